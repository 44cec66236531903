"""`manylora top`: what a frame shows, and what it says when there is nothing to show."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from rich.console import Console

from manylora.cli.app import main
from manylora.cli.commands import top as command
from manylora.cli.views.status_source import Away, Rates, StatusSource, rates_between
from manylora.cli.views.top_view import NARROW_LINES_ABOVE, frame
from manylora.core.engine.status import ColdStartStatus, EngineStats
from manylora.core.errors import ConfigError
from manylora.core.scheduling import QueueStatus
from manylora.serving.metrics.status_report import AdapterRow, Latency, Percentiles, ReplicaRow, StatusReport

URL = "http://127.0.0.1:8000"


def stats(**changes: Any) -> EngineStats:
    numbers = {field.name: 0 for field in dataclasses.fields(EngineStats) if field.default is dataclasses.MISSING}
    names: dict[str, Any] = {"running_adapters": (), "waiting_adapters": ()}
    pages = {
        "num_pages": 200,
        "num_kv_pages": 20,
        "num_prefix_pages": 10,
        "num_adapter_pages": 120,
        "num_free_pages": 50,
    }
    return EngineStats(**{**numbers, **names, **pages, **changes})


def adapter(name: str, **changes: Any) -> AdapterRow:
    row = AdapterRow(
        name=name,
        tier="device",
        state="idle",
        pinned=False,
        generation=1,
        rank=16,
        num_pages=7,
        num_running=0,
        num_waiting=0,
        num_requests=0,
        num_hits=0,
        last_used_s=None,
        latency=Latency(),
    )
    return msgspec.structs.replace(row, **changes)


def report(**changes: Any) -> StatusReport:
    whole = StatusReport(
        state="serving",
        model="llama",
        version="1.2.3",
        time=5000.0,
        started_at=1000.0,
        num_restarts=0,
        num_in_flight=0,
        window_s=60.0,
        latency=Latency(),
        base=Latency(),
        engine=stats(),
    )
    return msgspec.structs.replace(whole, **changes)


def lines(shown: Any, width: int = 130) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def show(found: StatusReport | None, rates: Rates | None = None, num_rows: int = 20, **more: Any) -> list[str]:
    return lines(frame(found, rates, url=URL, num_rows=num_rows, **more))


def test_the_memory_bar_is_divided_as_the_pages_are() -> None:
    shown = show(report(page_bytes=16384))
    (bar,) = [line for line in shown if line.startswith("memory")]
    assert [bar.count(mark) for mark in "█▓▒·"] == [6, 3, 36, 15]
    (legend,) = [line for line in shown if "prefix" in line]
    assert legend == "█ KV 20 (10%) ▓ prefix 10 (5%) ▒ adapters 120 (60%) · free 50 (25%) 200 pages of 16 KiB"


@pytest.mark.parametrize("pages", [(1, 1, 1, 997), (333, 333, 334, 0), (0, 0, 0, 1000)])
def test_no_cell_of_the_bar_is_lost(pages: tuple[int, int, int, int]) -> None:
    names = ("num_kv_pages", "num_prefix_pages", "num_adapter_pages", "num_free_pages")
    engine = stats(num_pages=1000, **dict(zip(names, pages, strict=True)))
    (bar,) = [line for line in show(report(engine=engine)) if line.startswith("memory")]
    assert sum(bar.count(mark) for mark in "█▓▒·") == 60


def test_counters_become_rates_between_two_reports_of_one_engine() -> None:
    before = report(time=5000.0, engine=stats(num_generated_tokens=100, num_loads=4, num_evictions=1, num_steps=10))
    engine = stats(num_generated_tokens=500, num_loads=5, num_evictions=3, num_steps=30, num_preemptions=1)
    after = report(time=5002.0, engine=engine)
    rates = rates_between(before, after)
    assert rates == Rates(tokens=200.0, steps=10.0, loads=0.5, evictions=1.0, preemptions=0.5)
    shown = show(after, rates)
    assert "work tokens 200.0/s steps 10.0/s loads 5 (0.5/s) evictions 3 (1.0/s)" in shown
    assert "work tokens - steps - loads 5 (-) evictions 3 (-)" in show(after)
    for other in (
        msgspec.structs.replace(before, num_restarts=1),
        msgspec.structs.replace(before, started_at=1.0),
        msgspec.structs.replace(before, engine=None),
        after,
    ):
        assert rates_between(other, after) is None


def test_cold_starts_by_mode_with_their_predictions() -> None:
    def status(mode: str, num_starts: int, num_measured: int) -> ColdStartStatus:
        return ColdStartStatus(
            mode=mode,
            num_starts=num_starts,
            num_measured=num_measured,
            expected_s=0.010 * num_measured,
            actual_s=0.012 * num_measured,
            error_s=0.002,
            relative_error=0.2,
            correction=1.0,
        )

    modes = (status("wait", 1, 0), status("assist", 1234, 1000))
    shown = show(report(engine=stats(cold_starts=modes)))
    assert "cold starts wait 1 assist 1,234 (12.0 ms, expected 10.0 ms)" in shown
    assert not any("cold starts" in line for line in show(report(engine=stats(cold_starts=(status("wait", 0, 0),)))))


def test_several_engines_have_a_table_and_no_rates_while_one_is_away() -> None:
    here = ReplicaRow(
        index=0,
        state="serving",
        pid=7,
        num_restarts=0,
        num_in_flight=3,
        num_running=2,
        num_waiting=1,
        num_free_pages=50,
        num_loads=4,
        num_resident=2,
        pinned=("a",),
    )
    away = ReplicaRow(index=1, state="restarting", pid=None, num_restarts=2, num_in_flight=0)
    assert not any(line.startswith("replica") for line in show(report(replicas=(here,))))
    shown = show(report(replicas=(here, away)))
    start = next(number for number, line in enumerate(shown) if line.startswith("replica"))
    rows = [line.split() for line in shown[start + 2 : start + 4]]
    assert rows == [
        ["0", "serving", "0", "3", "2", "1", "50", "4", "2", "1"],
        ["1", "restarting", "2", "0", "-", "-", "-", "-", "-", "0"],
    ]
    both = report(replicas=(here, msgspec.structs.replace(here, index=1)))
    later = {"time": both.time + 1.0}
    assert rates_between(both, msgspec.structs.replace(both, **later)) is not None
    assert rates_between(both, report(replicas=(here, away), **later)) is None


def test_latencies_in_their_units() -> None:
    latency = Latency(
        ttft_s=Percentiles(count=1234, p50=0.00005, p90=0.0032, p99=0.0456),
        inter_token_s=Percentiles(count=5, p50=0.789, p90=1.5, p99=3723.0),
    )
    shown = show(report(latency=latency))
    assert "first token 50 µs 3.20 ms 45.6 ms 1,234" in shown
    assert "between tokens 789 ms 1.50 s 1 h 2 min 5" in shown
    assert "whole request - - - 0" in shown


def test_adapters_as_they_come_and_only_as_many_as_fit() -> None:
    late = Latency(ttft_s=Percentiles(count=9, p50=0.1, p90=0.2, p99=0.3))
    rows = (
        adapter("[red]sql", pinned=True, state="active", num_running=2, num_requests=10, num_hits=9, latency=late),
        adapter("poet", tier="host", num_waiting=3, num_requests=1),
        adapter("unseen"),
    )
    shown = show(report(engine=stats(num_registered=5000), adapters=rows), num_rows=2)
    assert "[red]sql (pinned) device active 16 7 2 10 90% 300 ms" in shown
    assert "poet host idle 16 7 3 1 0%" in shown
    assert "2 of 5,000; times are P99, prices us saved per second and page" in shown
    assert not any("unseen" in line for line in shown)


def test_queues_only_where_there_are_some() -> None:
    assert not any("quota" in line for line in show(report()))
    assert not any("quota" in line for line in show(report(engine=stats(queues=(QueueStatus(num_waiting=7),)))))
    queues = (
        QueueStatus(num_waiting=3, num_running=2, below=0.25, quota_tokens=4096, used_tokens=1000),
        QueueStatus(num_waiting=1200, quota_tokens=8192),
    )
    found = report(engine=stats(queues=queues))
    assert msgspec.json.decode(msgspec.json.encode(found), type=StatusReport) == found
    shown = show(found)
    assert "1 3 2 0.25 4,096 1,000" in shown
    assert "2 1,200 - - 8,192 -" in shown


def test_without_an_engine_and_without_an_answer() -> None:
    shown = show(report(state="restarting", engine=None, num_restarts=2))
    assert shown == [
        f"manylora 1.2.3 llama at {URL} restarting up 1 h 6 min 2 restarts",
        "No engine serves now.",
    ]
    assert show(None, problem="no answer") == ["no answer (trying again; q to leave)"]


class Answers(BaseHTTPRequestHandler):
    """Answers as the server it belongs to was told."""

    code: int
    body: bytes
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        self.send_response(self.code)
        if self.code == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_args: Any) -> None:
        pass


@contextmanager
def server(code: int, body: bytes) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    seen: list[tuple[str, str | None]] = []
    handler = type("Handler", (Answers,), {"code": code, "body": body, "seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", seen
        finally:
            listening.shutdown()
            thread.join()


def test_an_answer_and_what_was_asked_for() -> None:
    with server(200, msgspec.json.encode(report())) as (url, seen):
        assert StatusSource(url + "/v1/", "secret").fetch(7) == report()
    assert seen == [("/status?adapters=7", "Bearer secret")]


def refusal(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


@pytest.mark.parametrize(
    ("code", "body", "error", "words"),
    [
        (401, refusal("send a key"), ConfigError, "refuses the key (HTTP 401). send a key"),
        (403, refusal("not with this key\x1b[2J"), ConfigError, "not with this key [2J"),
        (404, b"<html>", ConfigError, "is not a manylora server"),
        (302, b"", ConfigError, "is not a manylora server"),
        (200, b"<html>", ConfigError, "not as this version of manylora does"),
        (200, b'{"state": "serving"}', ConfigError, "not as this version of manylora does"),
        (503, refusal("starting"), Away, "starting"),
        (502, b"<html>", Away, "HTTP 502"),
        (429, b"[]", Away, "HTTP 429"),
    ],
)
def test_answers_that_are_none(code: int, body: bytes, error: type[Exception], words: str) -> None:
    with server(code, body) as (url, seen), pytest.raises(error) as caught:
        StatusSource(url, "secret").fetch(1)
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert len(seen) == 1, "followed a redirect"


def test_nobody_listens() -> None:
    with server(200, b"") as (url, _):
        pass
    with pytest.raises(Away, match="no answer from http://127"):
        StatusSource(url, None).fetch(1)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://a b", "http://host:port", "http://höst", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="expected something like"):
        StatusSource(url, None)


class Script:
    """Gives one thing after another, instead of a server; then Ctrl-C."""

    url = URL

    def __init__(self, *turns: StatusReport | Exception) -> None:
        self.turns = [*turns, KeyboardInterrupt()]

    def fetch(self, _num_adapters: int) -> StatusReport:
        turn = self.turns.pop(0)
        if isinstance(turn, StatusReport):
            return turn
        raise turn


def watch(monkeypatch: pytest.MonkeyPatch, *turns: StatusReport | Exception) -> str:
    """Run the command at a terminal; return everything that was written to it."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=120, height=40, legacy_windows=False)
    monkeypatch.setattr(command, "out", screen)
    monkeypatch.setattr(command, "StatusSource", lambda url, key: Script(*turns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    command.top(URL, 1.0, once=False, key=None)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_it_goes_on_while_the_server_is_away_and_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first = report(engine=stats(num_generated_tokens=0))
    later = report(time=5010.0, engine=stats(num_generated_tokens=1230))
    written = watch(monkeypatch, Away("nobody is there"), first, Away("gone again"), later)
    places = [written.index(words) for words in ("nobody is there", "llama at", "gone again", "123.0/s")]
    assert places == sorted(places)


def test_a_key_that_became_wrong_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="refuses the key"):
        watch(monkeypatch, report(), ConfigError("refuses the key"))


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["manylora", "top", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_frame_without_a_terminal_and_its_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = msgspec.json.encode(report(adapters=(adapter("poet"),)))
    with server(200, body) as (url, seen):
        monkeypatch.setenv("MANYLORA_ADMIN_KEY", "root")
        assert run(monkeypatch, url, "--interval", "0.1") == 0
    shown = capsys.readouterr().out
    assert "poet" in shown
    assert "\x1b" not in shown
    assert seen == [("/status?adapters=0", "Bearer root"), ("/status?adapters=20", "Bearer root")]
    assert run(monkeypatch, url, "--once") == 1
    assert "no answer" in capsys.readouterr().err
    assert run(monkeypatch, "ftp://x", "--once") == 2


def test_a_frame_fits_80_columns_and_24_lines() -> None:
    late = Percentiles(count=123456, p50=0.789, p90=1.5, p99=3723.0)
    latency = Latency(ttft_s=late, inter_token_s=late, e2e_s=late, queue_s=late)
    engine = stats(
        num_pages=10**6,
        num_kv_pages=123456,
        num_prefix_pages=234567,
        num_adapter_pages=345678,
        num_free_pages=296299,
        num_running=128,
        num_waiting=2048,
        num_registered=99999,
        num_adapter_requests=7,
        num_adapter_hits=5,
        num_resident=1234,
        num_host=12345,
    )
    row = adapter(
        "a" * 60, tier="device", num_running=99, num_waiting=999, num_requests=123456, num_hits=9, latency=latency
    )
    found = report(model="m" * 20, engine=engine, latency=latency, adapters=(row,) * 100)
    rates = Rates(tokens=123456.0, steps=1234.0, loads=99.9, evictions=1.0, preemptions=1.0)
    rows = 24 - NARROW_LINES_ABOVE
    shown = frame(found, rates, url=URL, num_rows=rows, is_narrow=True, problem="no answer")
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue().splitlines()
    assert len(written) <= 24
    assert all(len(line) <= 80 for line in written)
    text = " ".join(" ".join(written).split())
    for words in ("adapters 345,678 (35%)", "tokens 123,456/s", "hits 71%", "between tokens 789 ms", "10 of 99,999"):
        assert words in text, words
    assert sum(line.startswith("aaa") for line in written) == rows
    assert written[-2].split()[-3:] == ["1", "h", "2"] or "1 h 2 min" in written[-2]


def test_q_leaves_and_the_terminal_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r+b", buffering=0) as raw, io.TextIOWrapper(raw) as terminal:
        before = termios.tcgetattr(theirs)
        monkeypatch.setattr(sys, "stdin", terminal)
        os.write(ours, b"xq")
        written = watch(monkeypatch, report(), report(), ConfigError("asked again after q"))
        assert "llama at" in written
        assert termios.tcgetattr(theirs) == before
    os.close(ours)
