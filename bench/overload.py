"""Overload: which goodput is left at twice, five times and ten times the capacity, and how soon are the others refused?

    python bench/overload.py [--quick] [--rounds 5] [--seconds 20]

Two servers, one after the other: the demo model on the CPU, and a simulated A40 with Llama-7B, in real time; twelve
adapters and the base in turn, 50 to 150 tokens an answer, `--max-wait 1`. First the capacity is measured: as many
requests as there are seats, at once, of 100 tokens. Then an open-loop client in a process of its own offers
1, 2, 5 and 10 times the capacity as a Poisson process; the loads take turns in every round.

*Goodput* is the tokens per second of answers within the SLO (first token within 2 s, then 150 ms a token in the mean),
while the load was offered, after a ramp; an answer's tokens are spread evenly from its first to its last. It is
compared within each round with the highest of that round. *429* is the time from a request to its refusal, seen by the
client. A request that ended with any other status, with an error, or not at all is counted as *other*.
Writes `results/overload.json` and `.md`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from open_loop import Plan, Report, Seen
from publishing import arguments, publish, table

from manylora.bench.machine import machine
from manylora.bench.rounds import Others, in_turns, ratio_by_round, reason_to_refuse
from manylora.demo import demo_adapters

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "attack"))
from attack_target import Target, running

TTFT_S, TPOT_S = 2.0, 0.150
MAX_WAIT_S = 1.0
LOADS = (1, 2, 5, 10)
NUM_SEATS = 64
LEAST_TOKENS, MOST_TOKENS = 50, 150
CAPACITY_S = 8.0
LEAST_SHARE = 0.95
MOST_REFUSAL_S = 0.1
SERVERS = {"demo model on the CPU": ("demo",), "simulated A40": ("demo", "--simulate", "a40:llama-7b")}


def main() -> None:
    """Measure both servers and publish."""
    parser = arguments(__doc__, quick="one round of four seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load, without the ramp")
    parser.add_argument("--only", choices=("cpu", "simulated"), help="one of the servers")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 4.0
    others = Others()
    figures: dict[str, Any] = {"options": vars(options), "machine": machine(), "servers": {}}
    for name, model in SERVERS.items():
        if options.only is None or (options.only == "simulated") == ("--simulate" in model):
            figures["servers"][name] = measure(model, options)
    refused = reason_to_refuse(options.rounds, others.share())
    publish("overload", figures, text_of(figures, options), is_kept=not options.quick, refused=refused)


def measure(model: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Return the capacity of a server and the figures of each load, by round."""
    modules = [f"--lora-modules={name}={path}" for name, path in demo_adapters().items()]
    limits = ["--max-num-seqs", str(NUM_SEATS), "--max-wait", str(MAX_WAIT_S), *modules]
    rounds: dict[int, list[dict[str, float]]] = {load: [] for load in LOADS}
    with (
        tempfile.TemporaryDirectory(prefix="manylora-") as folder,
        running(Path(folder), *limits, model=model) as target,
    ):
        rate, answer_s = capacity(target)
        print(f"{' '.join(model)}: {rate:.1f} requests a second, {answer_s:.2f} s each", flush=True)
        for number, name in in_turns([str(load) for load in LOADS], options.rounds, num_warm_up=0):
            load = int(name)
            ramp_s = 1.5 * answer_s + MAX_WAIT_S
            rng = Random(number * 100 + load)
            at_s = arrivals(rng, load * rate, ramp_s + options.seconds)
            lengths = [rng.randint(LEAST_TOKENS, MOST_TOKENS) for _ in at_s]
            report = ask(target, at_s, lengths, ramp_s + options.seconds + TTFT_S + 2 * answer_s + 5.0)
            rounds[load].append(figures_of(report, ramp_s, options.seconds))
            print(f"round {number}, {load}x: {rounds[load][-1]}", flush=True)
    return {"requests_per_s": rate, "answer_s": answer_s, "rounds": rounds}


def capacity(target: Target) -> tuple[float, float]:
    """Return the requests per second and the duration of an answer when every seat is taken and none waits."""
    at_s, lengths = [0.0] * NUM_SEATS, [(LEAST_TOKENS + MOST_TOKENS) // 2] * NUM_SEATS
    ask(target, at_s, lengths, 60.0)  # warm: kernels, adapters on the device
    began = time.monotonic()
    durations: list[float] = []
    while time.monotonic() - began < CAPACITY_S:
        report = ask(target, at_s, lengths, 60.0)
        durations += [one.ended_at - one.sent_at for one in report.seen if one.ended_at is not None]
    answer_s = statistics.median(durations)
    return NUM_SEATS / answer_s, answer_s


def arrivals(rng: Random, rate: float, seconds: float) -> list[float]:
    """Return the times of a Poisson process."""
    at_s, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        at_s.append(now)
    return at_s


def ask(target: Target, at_s: list[float], lengths: list[int], until_s: float) -> Report:
    """Offer requests from another process."""
    plan = Plan(
        host=target.host,
        port=target.port,
        models=["demo", *demo_adapters()],
        at_s=at_s,
        num_tokens=lengths,
        until_s=until_s,
    )
    command = [sys.executable, str(Path(__file__).with_name("open_loop.py"))]
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([*command, file.name], input=msgspec.json.encode(plan), check=True)
        return msgspec.json.decode(file.read(), type=Report)


def is_good(one: Seen) -> bool:
    """Return whether an answer is whole and within the SLO."""
    if one.status != 200 or one.error is not None or one.first_at is None or one.ended_at is None:
        return False
    per_token_s = (one.ended_at - one.first_at) / (one.num_tokens - 1)
    return one.first_at - one.due_at <= TTFT_S and per_token_s <= TPOT_S


def tokens_within(one: Seen, begin: float, end: float) -> float:
    """Return the tokens of a whole answer that came between two times."""
    assert one.first_at is not None
    assert one.ended_at is not None
    within_s = min(end, one.ended_at) - max(begin, one.first_at)
    return one.num_tokens * max(0.0, within_s) / max(1e-9, one.ended_at - one.first_at)


def figures_of(report: Report, ramp_s: float, seconds: float) -> dict[str, float]:
    """Return the figures of a load after its ramp."""
    steady = [one for one in report.seen if one.due_at >= ramp_s]
    refusals = [one.head_at - one.sent_at for one in steady if one.status == 429 and one.head_at is not None]
    served = [one for one in steady if one.status == 200 and one.first_at is not None]
    whole = [one for one in steady if one.ended_at is not None and one.error is None and one.status in (200, 429)]
    return {
        "goodput": sum(tokens_within(one, ramp_s, ramp_s + seconds) for one in report.seen if is_good(one)) / seconds,
        "offered": len(steady) / seconds,
        "late": sum(not is_good(one) for one in served),
        "refused": len(refusals),
        "refusal_p99_s": percentile(refusals, 99),
        "ttft_p99_s": percentile([one.first_at - one.due_at for one in served if one.first_at is not None], 99),
        "without_retry_after": sum(one.status == 429 and not (one.retry_after or "").isdigit() for one in steady),
        "other": len(steady) - len(whole),
        "client_lag_p99_s": percentile(report.lag_s, 99),
    }


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile; NaN of nothing."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1] if values else math.nan


def text_of(figures: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the tables."""
    lines = [
        "# Overload",
        "",
        f"{NUM_SEATS} seats, {LEAST_TOKENS} to {MOST_TOKENS} tokens an answer, `--max-wait {MAX_WAIT_S:g}`; "
        f"{options.rounds} rounds of {options.seconds:g} s for each load. "
        f"SLO: first token within {TTFT_S:g} s, {TPOT_S * 1e3:g} ms a token. "
        f"Goal: goodput at least {LEAST_SHARE:.0%} of the highest of the round, 429 within {MOST_REFUSAL_S * 1e3:g} ms "
        "at P99. `python bench/overload.py`",
    ]
    heads = ["load", "goodput, tokens/s", "share of the highest (95 %)", "late", "429", "429 P99, ms", "TTFT P99, s"]
    heads += ["429 without Retry-After", "other", "client late P99, ms"]
    for name, server in figures["servers"].items():
        rounds = server["rounds"]
        best = [max(rounds[load][number]["goodput"] for load in LOADS) for number in range(options.rounds)]
        lines += ["", f"## {name}", "", f"Capacity: {server['requests_per_s']:.1f} requests a second.", ""]
        rows = []
        for load in LOADS:
            of = {key: [one[key] for one in rounds[load]] for key in rounds[load][0]}
            share = ratio_by_round(of["goodput"], best)
            rows.append(
                [
                    f"{load}x",
                    f"{statistics.median(of['goodput']):.0f}",
                    f"{share.median:.3f} ({share.low:.3f} to {share.high:.3f})",
                    f"{sum(of['late']):.0f}",
                    f"{sum(of['refused']):.0f}",
                    f"{max(of['refusal_p99_s']) * 1e3:.1f}",
                    f"{max(of['ttft_p99_s']):.2f}",
                    f"{sum(of['without_retry_after']):.0f}",
                    f"{sum(of['other']):.0f}",
                    f"{max(of['client_lag_p99_s']) * 1e3:.1f}",
                ]
            )
        lines += table(heads, rows)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
