"""The HTTP benchmark: tokens that carry the time, and a client that reads it off."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from http_client import SO_TIMESTAMPNS, arrived_at, epoch_s
from http_cost import http_table, measure_http
from paced import NUM_TICKS, TICK_S, PacedExecutor, write_paced_tokenizer

from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import SampledToken, SamplingParams
from manylora.serving.text import Detokenizer, Tokenizer


def planned(seq_id: int, prompt: tuple[int, ...]) -> PlannedSequence:
    return PlannedSequence(
        seq_id=seq_id,
        tokens=prompt,
        num_prompt_tokens=len(prompt),
        start=0,
        num_tokens=len(prompt),
        pages=(),
        adapter=None,
        rank=0,
        sampling=SamplingParams(),
        is_sampled=True,
        seed=0,
    )


def test_a_step_takes_what_its_slowest_prompt_asks_for_and_stamps_when_it_is_found_done() -> None:
    step = PacedExecutor().launch(StepPlan(step_id=0, sequences=(planned(1, (50, 9)), planned(2, (20, 9)))), now=1.0)
    assert step.ready_at == pytest.approx(1.0 + 50 * TICK_S)
    assert step.poll(1.004) is None
    result = step.poll(1.0061)
    assert result is not None
    assert {seq: token.token_id for seq, token in result.tokens.items()} == dict.fromkeys((1, 2), 10061)


def test_every_token_is_its_moment_in_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_paced_tokenizer(tmp_path))
    assert tokenizer.vocab_size == NUM_TICKS
    detokenizer = Detokenizer(tokenizer, (50, 3), SamplingParams())
    stamps = [detokenizer.push((SampledToken(token_id=tick),)).text for tick in (0, 10061, NUM_TICKS - 1)]
    assert stamps == ["~00000", "~10061", "~99999"]


def test_a_socket_tells_when_bytes_came_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            client.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            for _ in range(200):  # the kernel switches the stamps on in its own time
                sent_at = time.monotonic()
                connection.sendall(b"bytes")
                time.sleep(0.02)
                data, told, _, _ = client.recvmsg(100, 100)
                read_at = time.monotonic()
                arrived = arrived_at((read_at, told, data), epoch_s())
                if arrived < read_at - 0.01:
                    break
    assert sent_at - 0.005 <= arrived < read_at - 0.01, "the read came 20 ms after the bytes"
    assert arrived_at((7.0, [], b"bytes"), 0.0) == 7.0


@pytest.mark.slow
def test_a_small_run_counts_every_token_in_its_window() -> None:
    """The whole thing, four processes: nothing is lost, and a token never arrives before it was made."""
    (result,) = measure_http(num_streams=4, rates=(200.0,), seconds=1.0)
    for seen in (result.seen, result.floor):
        assert 0.3 * 800 <= seen.num_tokens <= 800  # only what comes while all streams run is counted
        assert seen.num_events <= seen.num_tokens + 4 * 2
        assert 0.0 <= seen.latency_ms["p50"] <= seen.latency_ms["p99"] <= seen.latency_ms["max"] < 5000.0
        assert all(seen.latency_ms[name] <= seen.read_ms[name] for name in seen.read_ms)
    # A chunk of the floor is as long as the server's, but for the text of tokens that a slow server gathers in one.
    sizes = [
        (seen.num_bytes - len("~00000") * seen.num_tokens) / seen.num_events for seen in (result.seen, result.floor)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    table = http_table([result, result], "python bench/http_cost.py", busy_share=0.01)
    assert table.count("| 200 |") == 2, "rounds of a rate are one row"
