"""What HTTP costs: streams through one API process, from the engine's hands to the client's.

A server as people start it (an API process and an engine process, real core and loop) on paced parts, and the cheapest
client in a third process. At every pace each token carries the moment it left the device, so the figure is what the
way adds to it: the core's bookkeeping, the message between the processes, text, JSON, HTTP, sockets.

Tokens are counted, not events: under load a chunk carries several, and that is how a busy server keeps up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from manylora.bench.http_client import StreamsResult
from manylora.bench.machine import machine
from manylora.bench.paced import TICK_S, write_paced_tokenizer
from manylora.errors import EngineDead

__all__ = ["PACES", "HttpResult", "http_report", "http_table", "measure_http"]

PACES = (20.0, 50.0, 100.0, 200.0, 300.0, 1000.0)
"""Steps per second asked of the engine: from a slow model to one that is never waited for."""

SECONDS = 5.0
"""Length of a run that keeps its pace."""

LEAST_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResult:
    """One pace.

    Args:
        steps_per_s: Asked of the engine.
        seen: By the client.
        api_cpu_us: Microseconds of the API process per token; ``None`` where the system does not tell.
        engine_cpu_us: Microseconds of the engine process per token.
    """

    steps_per_s: float
    seen: StreamsResult
    api_cpu_us: float | None
    engine_cpu_us: float | None


def measure_http(*, num_streams: int, paces: Sequence[float] = PACES, seconds: float = SECONDS) -> list[HttpResult]:
    """Start a server, run every pace against it, and stop it.

    Args:
        num_streams: Concurrent streams.
        paces: Steps per second.
        seconds: Length of each run, were the pace kept.

    Raises:
        EngineDead: The server did not start.
    """
    with _server(num_streams) as (process, port):
        return [_run(process.pid, port, num_streams, pace, seconds) for pace in paces]


def http_report(results: Sequence[HttpResult], command: str) -> dict[str, object]:
    """Return the results as plain data, with what they were made by."""
    return {"command": command, "machine": machine(), "results": [asdict(result) for result in results]}


def http_table(results: Sequence[HttpResult], command: str) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Streams through one API process",
        "",
        f"`{command}` on {machine()['cpu']}, {machine()['cores']} cores, load average "
        f"{os.getloadavg()[0]:.1f}: {results[0].seen.num_streams} streams at once,",
        "server (API process, engine process with the real core on an executor that only waits) and client on one "
        "machine. *Added latency* is from the",
        "end of the device's step to the client's read, in milliseconds, of every token; the client looks every half "
        "millisecond. All streams step together:",
        "the last token of a step waits for the writes of all others. The machine had other work where its load "
        "average",
        "is above its cores.",
        "",
        "| steps/s asked | tokens/s received | tokens an event | added P50 | P90 | P99 | API us a token | engine |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        seen, added = result.seen, result.seen.latency_ms
        costs = ("-" if cost is None else f"{cost:.1f}" for cost in (result.api_cpu_us, result.engine_cpu_us))
        lines.append(
            f"| {result.steps_per_s:.0f} | {seen.tokens_per_s:,.0f} | {seen.num_tokens / seen.num_events:.1f} "
            f"| {added['p50']:.1f} | {added['p90']:.1f} | {added['p99']:.1f} | {' | '.join(costs)} |"
        )
    return "\n".join([*lines, ""])


@contextmanager
def _server(num_streams: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_paced_tokenizer(Path(folder))
        command = [sys.executable, "-m", "manylora", "serve", str(tokenizer), "--served-model-name", "paced"]
        command += ["--builder", "manylora.bench.paced:build_paced_parts", "--port", "0", "--log-level", "error"]
        command += ["--max-num-seqs", str(num_streams), "--num-pages", str(num_streams * 512)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise EngineDead(f"the server did not start: {' '.join(command)}")
            yield process, int(line.rpartition(":")[2])
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def _run(api_pid: int, port: int, num_streams: int, pace: float, seconds: float) -> HttpResult:
    engine_pid = _child_of(api_pid)
    num_tokens = max(LEAST_STEPS, int(seconds * pace))
    before = _cpu_s(api_pid), _cpu_s(engine_pid)
    numbers = (port, num_streams, max(1, round(1 / pace / TICK_S)), num_tokens)
    command = [sys.executable, "-m", "manylora.bench.http_client", "127.0.0.1", *map(str, numbers)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    after = _cpu_s(api_pid), _cpu_s(engine_pid)
    costs = [
        None if end is None or start is None else (end - start) / (num_streams * num_tokens) * 1e6
        for start, end in zip(before, after, strict=True)
    ]
    return HttpResult(steps_per_s=pace, seen=StreamsResult(**told), api_cpu_us=costs[0], engine_cpu_us=costs[1])


def _child_of(pid: int) -> int | None:
    """Return a process's first child; ``None`` where there is no ``/proc``."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    return int(children[0]) if children else None


def _cpu_s(pid: int | None) -> float | None:
    """Return the processor time of a process so far, in seconds; ``None`` where there is no ``/proc``."""
    path = Path(f"/proc/{pid}/stat")
    if pid is None or not path.exists():
        return None
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
