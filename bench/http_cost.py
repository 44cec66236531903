"""The cost of HTTP: streams through one API process, from the engine to the client.

    python bench/http_cost.py [--quick] [--streams 200] [--rounds 5]

The server runs as in production (an API process and an engine process, with the real core and loop), on paced parts. A
minimal client runs in a third process. Each token carries the time at which it left the device, so the figure is the
latency that is added after it: the core's bookkeeping, the message between the processes, text, JSON, HTTP, sockets.

Tokens are counted, not events: under load a chunk carries several. Writes `results/http.json` and `.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from http_client import StreamsResult
from paced import TICK_S, write_paced_tokenizer
from publishing import Others, arguments, middle_of_rounds, publish, reason_to_refuse

from manylora.core.errors import EngineDead
from manylora.lab.bench.rounds import machine

HERE = Path(__file__).resolve().parent

RATES = (20.0, 50.0, 100.0, 200.0, 300.0, 1000.0)
"""Steps per second asked of the engine: from a slow model to one that is never waited for."""

SECONDS = 5.0
"""Length of a run that keeps its rate."""

LEAST_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResult:
    """One rate in one round.

    Args:
        steps_per_s: Rate of the engine's steps.
        seen: Figures of the client.
        api_cpu_us: Microseconds of the API process per token; ``None`` where the system does not tell.
        engine_cpu_us: Microseconds of the engine process per token.
        floor: Figures of the same client with an application that only writes (see ``paced``).
        floor_cpu_us: Microseconds of that process per token.
    """

    steps_per_s: float
    seen: StreamsResult
    api_cpu_us: float | None
    engine_cpu_us: float | None
    floor: StreamsResult
    floor_cpu_us: float | None


def measure_http(
    *, num_streams: int, rates: Sequence[float] = RATES, seconds: float = SECONDS, rounds: int = 1
) -> list[HttpResult]:
    """Start a server and its floor, run every rate against one and the other in every round, and stop them.

    Args:
        num_streams: Concurrent streams.
        rates: Steps per second.
        seconds: Length of each run, were the rate kept.
        rounds: Runs of each rate; server and floor take turns at going first.

    Raises:
        EngineDead: The server did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_paced_tokenizer(Path(folder))
        command = ["manylora", "serve", str(tokenizer), "--served-model-name", "paced"]
        command += ["--builder", "paced:build_paced_parts", "--port", "0", "--log-level", "error"]
        command += ["--max-num-seqs", str(num_streams), "--num-pages", str(num_streams * 512)]
        with _process(command) as server, _process(["paced", str(num_streams)]) as floor:
            return [
                _measure(server, floor, num_streams, rate, seconds, is_floor_first=number % 2 == 1)
                for number in range(rounds)
                for rate in rates
            ]


def http_table(results: Sequence[HttpResult], command: str, busy_share: float) -> str:
    """Return the results as Markdown.

    Args:
        results: One for each rate and round.
        command: The command that measured them.
        busy_share: Share of the machine's processor time that other processes took.
    """
    about = machine()
    rates = list(dict.fromkeys(result.steps_per_s for result in results))
    lines = [
        "# Streams through one API process",
        "",
        f"`{command}` on {about['cpu']}, {about['cores']} cores: {results[0].seen.num_streams} streams at once, "
        f"{len(results) // len(rates)} rounds. Other processes took {busy_share:.1%} of the machine's processor time.",
        "",
        "Server (API process, engine process with the real core on an executor that only waits, planning ahead as for",
        "a GPU) and client share the machine. *Added latency* is from the end of the device's step to the arrival in",
        "the client's socket, in milliseconds, of every token; *read* is to the client's read, which looks every half",
        "millisecond and reads one socket after the other. All streams step together: the last token of a step waits",
        "for the writes of all others. Medians of the rounds; P50 and P99 of what is added with its 95 % interval.",
        "",
        "| steps/s asked | tokens/s received | tokens an event | added P50 | P90 | P99 | read P99 | API us a token "
        "| engine |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        _row(rate, results, lambda one: one.seen, lambda one: (one.api_cpu_us, one.engine_cpu_us)) for rate in rates
    ]
    lines += [
        "",
        "The floor: the same client, library and settings, and an application that does nothing but write as many",
        "bytes to as many streams in one step. It has no engine, no second process, no text and no JSON. Its next step",
        "begins when the writes of the last are over, so a high rate is not reached.",
        "",
        "| steps/s asked | tokens/s received | tokens an event | added P50 | P90 | P99 | read P99 | us a token |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(rate, results, lambda one: one.floor, lambda one: (one.floor_cpu_us,)) for rate in rates]
    return "\n".join([*lines, ""])


def _row(
    rate: float,
    results: Sequence[HttpResult],
    side: Callable[[HttpResult], StreamsResult],
    costs_of: Callable[[HttpResult], Sequence[float | None]],
) -> str:
    """Return a rate's row: the medians of its rounds."""
    rounds = [one for one in results if one.steps_per_s == rate]
    seen = [side(one) for one in rounds]
    p50, p99 = (middle_of_rounds([one.latency_ms[name] for one in seen]) for name in ("p50", "p99"))
    p90 = statistics.median(one.latency_ms["p90"] for one in seen)
    read_p99 = statistics.median(one.read_ms["p99"] for one in seen)
    tokens_per_s = statistics.median(one.tokens_per_s for one in seen)
    tokens_an_event = statistics.median(one.num_tokens / one.num_events for one in seen)
    columns = zip(*(costs_of(one) for one in rounds), strict=True)
    costs = [[one for one in column if one is not None] for column in columns]
    shown = (f"{statistics.median(column):.1f}" if column else "-" for column in costs)
    return (
        f"| {rate:.0f} | {tokens_per_s:,.0f} | {tokens_an_event:.1f} | {p50} | {p90:.1f} | {p99} | {read_p99:.1f} "
        f"| {' | '.join(shown)} |"
    )


@dataclass(frozen=True, slots=True)
class _Process:
    """A server in a process of its own.

    Args:
        pid: Its process.
        port: Its port.
    """

    pid: int
    port: int


@contextmanager
def _process(command: Sequence[str]) -> Iterator[_Process]:
    """Start a module that says in one line, which ends with its port, that it listens."""
    places = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]  # where the server finds its builder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise EngineDead(f"the server did not start: {' '.join(command)}")
        yield _Process(process.pid, int(line.rpartition(":")[2]))
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _measure(
    server: _Process, floor: _Process, num_streams: int, rate: float, seconds: float, *, is_floor_first: bool
) -> HttpResult:
    num_tokens = max(LEAST_STEPS, int(seconds * rate))
    numbers = (num_streams, max(1, round(1 / rate / TICK_S)), num_tokens)
    sides: list[tuple[int, Sequence[int | None]]] = [
        (server.port, [server.pid, _child_of(server.pid)]),
        (floor.port, [floor.pid]),
    ]
    found = {place: _run(sides[place][0], numbers, sides[place][1]) for place in ((1, 0) if is_floor_first else (0, 1))}
    (seen, (api_cpu_us, engine_cpu_us)), (floor_seen, (floor_cpu_us,)) = found[0], found[1]
    return HttpResult(
        steps_per_s=rate,
        seen=seen,
        api_cpu_us=api_cpu_us,
        engine_cpu_us=engine_cpu_us,
        floor=floor_seen,
        floor_cpu_us=floor_cpu_us,
    )


def _run(
    port: int, numbers: tuple[int, int, int], pids: Sequence[int | None]
) -> tuple[StreamsResult, list[float | None]]:
    """Run the client; return what it saw, and the processor time of each process in microseconds per token."""
    before = [cpu_seconds(pid) for pid in pids]
    command = [sys.executable, str(HERE / "http_client.py"), "127.0.0.1", str(port), *map(str, numbers)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    after = [cpu_seconds(pid) for pid in pids]
    num_streams, _, num_tokens = numbers
    costs = [
        None if end is None or start is None else (end - start) / (num_streams * num_tokens) * 1e6
        for start, end in zip(before, after, strict=True)
    ]
    return StreamsResult(**told), costs


def _child_of(pid: int) -> int | None:
    """Return a process's first child; ``None`` where there is no ``/proc``."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    return int(children[0]) if children else None


def cpu_seconds(pid: int | None) -> float | None:
    """Return the processor time of a process so far, in seconds; ``None`` where there is no ``/proc``."""
    path = Path(f"/proc/{pid}/stat")
    if pid is None or not path.exists():
        return None
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = arguments(__doc__, quick="20 streams, one rate, a second")
    parser.add_argument("--streams", type=int, default=200, help="at once")
    parser.add_argument("--rate", type=float, action="append", help="steps per second of the engine; repeatable")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each run that keeps its rate")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_streams, rates, seconds, rounds = options.streams, options.rate or RATES, options.seconds, options.rounds
    if options.quick:
        num_streams, rates, seconds, rounds = 20, (100.0,), 1.0, 1
    others = Others()
    results = measure_http(num_streams=num_streams, rates=rates, seconds=seconds, rounds=rounds)
    busy_share = others.share()
    command = f"python bench/http_cost.py --streams {num_streams} --rounds {rounds}"
    report = {
        "command": command,
        "machine": machine(),
        "busy_share": busy_share,
        "results": [asdict(result) for result in results],
    }
    refused = reason_to_refuse(rounds, busy_share)
    publish("http", report, http_table(results, command, busy_share), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
