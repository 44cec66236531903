"""The load generator, against a server of a few lines: what it sends when, what it makes of answers and refusals."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.errors import ConfigError
from manylora.lab.bench.ask import EventParser, LoadRequest
from manylora.lab.bench.load import LoadRun, Progress, run_load
from manylora.lab.bench.report import make_report
from manylora.lab.bench.target import LEAST_TOKEN, ModelNames, Target, TextPrompts, TokenPrompts, discover_models
from manylora.lab.measure import Slo
from manylora.lab.workloads import RequestSpec

Respond = Callable[[dict[str, object], asyncio.StreamWriter], object]
"""Writes the response to a request body."""


@asynccontextmanager
async def serving(respond: Respond) -> AsyncIterator[Target]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
            )
            body = json.loads(await reader.readexactly(length) or b"{}")
            result = respond(body, writer)
            if asyncio.iscoroutine(result):
                await result
            await writer.drain()
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Target(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        await server.wait_closed()


def ok(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")


def event(writer: asyncio.StreamWriter, content: object) -> None:
    writer.write(b"data: " + json.dumps(content).encode() + b"\n\n")


def refuse(writer: asyncio.StreamWriter, status: int, retry_after: str = "0") -> None:
    body = b'{"error":{"message":"no room"}}'
    head = f"HTTP/1.1 {status} No\r\nRetry-After: {retry_after}\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)


async def answer(body: dict[str, object], writer: asyncio.StreamWriter, *, pause_s: float = 0.0) -> None:
    """Stream one chunk per token, and usage."""
    ok(writer)
    assert isinstance(body["max_tokens"], int)
    for _ in range(body["max_tokens"]):
        await asyncio.sleep(pause_s)
        event(writer, {"choices": [{"text": "a"}], "usage": None})
        await writer.drain()
    usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 4}}
    event(writer, {"choices": [], "usage": usage})
    writer.write(b"data: [DONE]\n\n")


def questions(target: Target, times: list[float], tokens: int = 3, adapter: str = "") -> list[LoadRequest]:
    def one(index: int, at_s: float) -> LoadRequest:
        request = RequestSpec(arrival_s=at_s, num_prompt_tokens=5, num_output_tokens=tokens)
        body = target.body(adapter or "base", request, [1, 2, 3, 4, 5])
        return LoadRequest(request_id=str(index), at_s=at_s, adapter=adapter, num_prompt_tokens=5, body=body)

    return [one(index, at_s) for index, at_s in enumerate(times)]


def run(respond: Respond, times: list[float], **options: object) -> LoadRun:
    async def scenario() -> LoadRun:
        async with serving(respond) as target:
            return await run_load(target, questions(target, times), **options)  # type: ignore[arg-type]

    return asyncio.run(scenario())


def test_an_answer_is_written_down_as_the_server_tells_it() -> None:
    done = run(lambda body, writer: answer(body, writer, pause_s=0.01), [0.0])
    (one,) = done.answers
    record = one.record
    assert record.error is None
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (7, 3, 4)
    assert (one.num_chunks, one.has_usage, len(record.gaps_s)) == (3, True, 2)
    assert record.ttft_s is not None and 0.01 <= record.ttft_s <= record.e2e_s
    assert record.max_gap_s == max(record.gaps_s) >= 0.005


def test_requests_are_sent_when_due_whatever_became_of_others() -> None:
    """Nobody is answered before all twenty are there: a closed loop would wait for ever."""
    are_all_here = asyncio.Event()
    calls = 0

    async def respond(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            are_all_here.set()
        await asyncio.wait_for(are_all_here.wait(), 60)
        await answer(body, writer)

    done = run(respond, [index * 0.005 for index in range(20)])
    records = [one.record for one in done.answers]
    assert [record.error for record in records] == [None] * 20
    assert max(record.arrived_at for record in records) < min(record.finished_at for record in records)
    assert len(done.lag_s) == 20


def test_refusals_are_counted_by_kind_and_not_sent_again() -> None:
    calls = 0

    def respond(body: dict[str, object], writer: asyncio.StreamWriter) -> object:
        nonlocal calls
        calls += 1
        if calls <= 2:
            return refuse(writer, 429)
        return refuse(writer, 503) if calls == 3 else answer(body, writer)

    done = run(respond, [0.0, 0.05, 0.1, 0.15])
    report = make_report(done, slo=Slo(), offered_per_s=1.0)
    assert calls == 4
    assert {kind: count for kind, (count, _) in report.errors.items()} == {"HTTP 429": 2, "HTTP 503": 1}
    assert "no room" in report.errors["HTTP 429"][1]
    assert (report.summary.num_requests, report.summary.num_errors) == (4, 3)
    # As if sent a second apart: errors of the warm-up are no more counted than its requests are.
    for one in list(done.answers):
        at = float(one.record.request_id)
        done.answers[done.answers.index(one)] = replace(
            one, record=replace(one.record, arrived_at=at, finished_at=at + 0.1)
        )
    report = make_report(done, slo=Slo(), offered_per_s=1.0, warm_up_s=1.0)
    assert {kind: count for kind, (count, _) in report.errors.items()} == {"HTTP 429": 1, "HTTP 503": 1}
    assert (report.summary.num_requests, report.summary.num_errors) == (3, 2)


def test_retries_are_an_option_and_their_wait_counts() -> None:
    calls = 0

    def respond(body: dict[str, object], writer: asyncio.StreamWriter) -> object:
        nonlocal calls
        calls += 1
        return refuse(writer, 429, retry_after="0.1") if calls == 1 else answer(body, writer)

    done = run(respond, [0.0], retries=1)
    (one,) = done.answers
    assert (one.record.error, one.num_retries) == (None, 1)
    assert one.record.ttft_s is not None and one.record.ttft_s >= 0.1


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ([{"choices": [{"text": "a"}]}], "ended early"),
        ([{"error": {"message": "the engine died"}}], "an error in the stream"),
    ],
)
def test_a_stream_that_breaks_is_an_error(content: list[object], kind: str) -> None:
    def respond(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        ok(writer)
        for one in content:
            event(writer, one)

    (one,) = run(respond, [0.0]).answers
    assert one.record.error is not None and one.record.error.startswith(kind)


def test_a_server_without_usage_is_counted_by_chunks() -> None:
    def respond(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        ok(writer)
        for content in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}):
            event(writer, {"choices": [{"delta": content}]})
        writer.write(b"data: [DONE]\n\n")

    report = make_report(run(respond, [0.0]), slo=Slo(), offered_per_s=1.0)
    assert report.is_counted_by_chunks
    assert report.records[0].num_output_tokens == 2


def test_interrupting_keeps_what_there_is() -> None:
    def respond(body: dict[str, object], writer: asyncio.StreamWriter) -> object:
        calls.append(1)
        return answer(body, writer, pause_s=0.0 if len(calls) == 1 else 60.0)

    def interrupt(progress: Progress) -> None:
        if (progress.num_done, progress.num_sent) == (1, 2):
            os.kill(os.getpid(), signal.SIGINT)

    calls: list[int] = []
    done = run(respond, [0.0, 0.1, 60.0], on_progress=interrupt)
    assert len(done.answers) == 1
    assert (done.num_unsent, done.num_unfinished) == (1, 1)


def test_a_server_that_refuses_the_warm_up_ends_the_run_with_its_reason() -> None:
    async def scenario() -> None:
        async with serving(lambda body, writer: refuse(writer, 400)) as target:
            asked = questions(target, [0.0])
            with pytest.raises(ConfigError, match=r"HTTP 400.*no room"):
                await run_load(target, asked, warm_up=asked)

    asyncio.run(scenario())


def test_models_with_a_parent_are_adapters() -> None:
    cards = {
        "data": [
            {"id": "llama", "parent": None, "root": "x"},
            {"id": "a", "parent": "llama"},
            {"id": "b", "parent": "llama"},
        ]
    }

    def respond(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        content = json.dumps(cards).encode()
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    async def scenario() -> ModelNames:
        async with serving(respond) as target:
            return await discover_models(target)

    assert asyncio.run(scenario()) == ModelNames(base="llama", adapters=("a", "b"))


@given(st.lists(st.integers(0, 40), max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_events_are_found_however_the_bytes_are_cut(cuts: list[int], newline: str) -> None:
    data = newline.join(["data: one", "", ": a comment", "event: x", "data:two", "", "data: [DONE]", "", ""]).encode()
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    parser = EventParser()
    found = [content for low, high in itertools.pairwise(edges) for content in parser.feed(data[low:high])]
    assert found == [b"one", b"two", b"[DONE]"]


def test_prompts_are_equal_where_the_workload_says_so() -> None:
    def spec(*prefix: int) -> RequestSpec:
        return RequestSpec(
            arrival_s=0.0, num_prompt_tokens=30, num_output_tokens=1, prefix=prefix, prefix_block_tokens=8
        )

    prompts = TokenPrompts(100, seed=1)
    first, second, other = prompts.make(0, spec(1, 2)), prompts.make(1, spec(1, 2)), prompts.make(2, spec(1, 3))
    assert len(first) == len(second) == len(other) == 30
    assert first[:16] == second[:16] and first[16:] != second[16:]
    assert first[:8] == other[:8] and first[8:16] != other[8:16]
    assert all(LEAST_TOKEN <= token < 100 for token in first)
    assert first == TokenPrompts(100, seed=1).make(0, spec(1, 2)) != TokenPrompts(100, seed=2).make(0, spec(1, 2))
    assert len(TextPrompts(prompts).make(0, spec()).split()) == 30
