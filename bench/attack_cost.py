"""What do hostile requests cost others? `/health`, a neighbour's stream and memory, case by case.

    python bench/attack_cost.py [--quick] [--rounds 5] [--seconds 1.5]

A server with a simulated A40, an attacker, and a process with a neighbour that streams and a poller of `/health`. In
each round of a case the neighbour first runs undisturbed, then beside the case, which is repeated for as long. The
cases are those of `tests/attack`: hostile requests one after another, texts that must be tokenized sixteen at a time,
half-sent requests, and headers without end. Goals: `/health` within 50 ms at P99, the neighbour's longest gap at most
twice the undisturbed one, memory of API and engine back to within 5 % afterwards. A quarter of an hour. Writes
`results/attack.json` and `.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from publishing import Others, arguments, publish, reason_to_refuse, table

from manylora.lab.bench.rounds import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "attack"))
from attack_target import MIB, Target, Watch, half_sent, running
from corpus import HOSTILE, Hostile

HEALTH_S, MOST_GAP, MOST_GROWTH = 0.050, 2.0, 0.05
SETTLE_S = 1.0
NUM_HALF_SENT, NUM_AT_ONCE = 100, 16

Attack = Callable[[Target], None]


def send(one: Hostile) -> Attack:
    """Return the attack that sends a request."""

    def attack(target: Target) -> None:
        status = target.ask("POST", one.path, one.body).status
        if status != one.status:
            raise SystemExit(f"{one.slug}: Got {status = }, expected {one.status}")

    return attack


def send_at_once(one: Hostile) -> Attack:
    """Return the attack that sends a request from many clients at once."""

    def attack(target: Target) -> None:
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            list(pool.map(lambda _: target.ask("POST", one.path, one.body), range(NUM_AT_ONCE)))

    return attack


def send_half(target: Target) -> None:
    """Open many connections that send half a request, and leave."""
    with contextlib.ExitStack() as stack:
        for one in half_sent(target, NUM_HALF_SENT):
            stack.enter_context(one)


def send_headers(target: Target) -> None:
    """Send a header until the server closes the connection, at most 64 MiB of it."""
    with target.connect() as connection, contextlib.suppress(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(1024):
            connection.sendall(b"a" * (1 << 16))


def main() -> None:
    """Measure every case and publish the figures."""
    parser = arguments(__doc__, quick="one round of half a second, six cases")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each half of a round")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 0.5
    dense = next(one for one in HOSTILE if one.slug.startswith("dense"))
    cases: dict[str, Attack] = {
        f"{NUM_AT_ONCE} texts at once": send_at_once(dense),
        f"{NUM_HALF_SENT} half-sent requests": send_half,
        "headers without end": send_headers,
        **{one.slug: send(one) for one in HOSTILE},
    }
    if options.quick:
        cases = dict(list(cases.items())[:6])
    others = Others()
    with tempfile.TemporaryDirectory(prefix="manylora-") as folder, running(Path(folder)) as target:
        figures = {}
        with attacker(target, list(cases.values())) as attack:
            for number in range(len(cases)):
                attack(number, 0.0)  # modules, buffers and threads that are there afterwards
            for number, name in enumerate(cases):
                figures[name] = measure(target, functools.partial(attack, number, options.seconds), options)
                print(name, figures[name], flush=True)
    refused = reason_to_refuse(options.rounds, others.share())
    text = text_of(figures, options)
    publish("attack", {"machine": machine(), "cases": figures}, text, is_kept=not options.quick, refused=refused)


@contextlib.contextmanager
def attacker(target: Target, attacks: Sequence[Attack]) -> Iterator[Callable[[int, float], int]]:
    """Run a process that attacks: it does not take the interpreter's lock from those who look at the clock.

    Yields:
        A function of an attack's number and its seconds, which returns how often it was made.
    """
    here, there = multiprocessing.Pipe()

    def work() -> None:
        while (asked := there.recv()) is not None:
            number, seconds = asked
            num, until = 0, time.monotonic() + seconds
            while not num or time.monotonic() < until:
                attacks[number](target)
                num += 1
            there.send(num)

    # A fork: attacks are functions of no name.
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    there.close()

    def attack(number: int, seconds: float) -> int:
        here.send((number, seconds))
        return int(here.recv())

    try:
        yield attack
        here.send(None)
        process.join()
    finally:
        process.kill()


def measure(target: Target, attack: Callable[[], int], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a case."""
    calm_gaps: list[float] = []
    gaps: list[float] = []
    health: list[float] = []
    num = 0
    before = target.memory()
    peak = dict(before)
    for _ in range(options.rounds):
        with Watch(target) as calm:
            time.sleep(options.seconds)
        with Watch(target) as seen:
            num += attack()
        if seen.errors or calm.errors:
            raise SystemExit(str(seen.errors + calm.errors))
        calm_gaps.append(max(calm.gaps_s))
        gaps.append(max(seen.gaps_s))
        health += seen.health_s
        peak = {name: max(peak[name], before[name] + grown) for name, grown in seen.growth.items()}
    time.sleep(SETTLE_S)
    after = target.memory()
    return {
        "num": num,
        "health_p99_s": statistics.quantiles(health, n=100)[98],
        "health_max_s": max(health),
        "gap_s": max(gaps),
        "gap_ratio": statistics.median(one / other for one, other in zip(gaps, calm_gaps, strict=True)),
        "before": before,
        "peak": peak,
        "after": after,
    }


def text_of(figures: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the table."""
    heads = ["case", "times", "`/health` P99, ms", "neighbour's longest gap, ms", "over undisturbed"]
    heads += ["API peak, MiB", "API after", "engine after", "goals"]
    rows = []
    num_missed: Counter[str] = Counter()
    for name, one in figures.items():
        change = {process: one["after"][process] / one["before"][process] - 1 for process in ("api", "engine")}
        goals = {
            "`/health`": one["health_p99_s"] <= HEALTH_S,
            "gap": one["gap_ratio"] <= MOST_GAP,
            "memory": max(change.values()) <= MOST_GROWTH,
        }
        missed = [goal for goal, is_met in goals.items() if not is_met]
        num_missed.update(missed)
        rows.append(
            [
                name,
                one["num"],
                f"{one['health_p99_s'] * 1e3:.1f}",
                f"{one['gap_s'] * 1e3:.0f}",
                f"{one['gap_ratio']:.2f}",
                f"{(one['peak']['api'] - one['before']['api']) / MIB:+.0f}",
                f"{change['api']:+.1%}",
                f"{change['engine']:+.1%}",
                "met" if not missed else f"**missed: {', '.join(missed)}**",
            ]
        )
    lines = [
        "# What hostile requests cost others",
        "",
        f"{options.rounds} rounds of {options.seconds:g} s undisturbed and {options.seconds:g} s attacked, "
        f"a simulated A40 in real time. Goals: `/health` within {HEALTH_S * 1e3:g} ms at P99, "
        f"the longest gap at most {MOST_GAP:g} times the "
        f"undisturbed one (median of the rounds), memory afterwards within {MOST_GROWTH:.0%} of before. "
        "`python bench/attack_cost.py`",
        "",
        *table(heads, rows),
        "",
        "All goals are met." if not num_missed else f"Missed: {dict(num_missed)} of {len(figures)} cases.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
