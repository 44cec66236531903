"""Overload: which goodput is left at twice, five times and ten times the capacity, and how soon are the others refused?

    python bench/overload.py [--quick] [--rounds 5] [--seconds 11] [--only cpu]

Two servers, one after the other: the demo model on the CPU, and a simulated A40 with Llama-7B, in real time; twelve
adapters and the base in turn, 50 to 150 tokens an answer, `--max-wait 1`. First the capacity is measured: a guess from
as many requests as there are seats, at once, of 100 tokens; then the goodput when a quarter more than the guess is
offered, in requests of the mean length. Then an open-loop client in a process of its own offers 1, 2, 5 and 10 times
the capacity; the loads take turns in every round. Arrivals are a Poisson process given their number, and lengths are
spread evenly, so that a load is no larger or smaller by chance.

*Goodput* is the tokens per second of answers within the SLO (first token within 2 s of the time at which the request
was due, then 150 ms a token in the mean), while the load was offered, after a ramp; an answer's tokens are spread
evenly from its first to its last. It is compared within each round with the highest of that round. *429* is the time
from a request to its refusal, seen by the client. A request that ended with any other status, with an error, or not at
all is counted as *other*.

On a machine with few processors the client and the refusals take processor time that the answers then lack. So the
table has the processor time of the client, of the API process and of the engine, in the part of the load that counts,
and how late the client was: a client that is late offers less than it says.
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
import psutil
from open_loop import Plan, Report, Seen
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import ratio_by_round

from manylora.demo import demo_adapters
from manylora.lab.bench.rounds import in_turns, machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "attack"))
from attack_target import Target, running

TTFT_S, TPOT_S = 2.0, 0.150
MAX_WAIT_S = 1.0
LOADS = (1, 2, 5, 10)
NUM_SEATS = 64
LEAST_TOKENS, MOST_TOKENS = 50, 150
MEAN_TOKENS = (LEAST_TOKENS + MOST_TOKENS) // 2
GUESSES, GUESSED_LOAD, CAPACITY_S = 3, 1.25, 8.0
LEAST_SHARE = 0.95
MOST_REFUSAL_S = 0.1
MOST_LATE_S = 0.05
"""A client that is later than this is too slow for its load."""
SERVERS = {"demo model on the CPU": ("demo",), "simulated A40": ("demo", "--simulate", "a40:llama-7b")}


def main() -> None:
    """Measure both servers and publish."""
    parser = arguments(__doc__, quick="one round of four seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=11.0, help="of each load, without the ramp")
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
            figures = offer(target, load * rate, answer_s, options.seconds, seed=number * 100 + load)
            rounds[load].append(figures)
            print(f"round {number}, {load}x: {shown(figures)}", flush=True)
    return {"requests_per_s": rate, "answer_s": answer_s, "rounds": rounds}


def capacity(target: Target) -> tuple[float, float]:
    """Return the requests per second that the server answers with all seats taken, and the duration of an answer."""
    durations: list[float] = []
    for _ in range(1 + GUESSES):  # the first warms: kernels, adapters on the device
        durations = [
            one.ended_at - one.sent_at
            for one in ask(target, [0.0] * NUM_SEATS, [MEAN_TOKENS] * NUM_SEATS, 60.0).report.seen
            if one.ended_at is not None and one.status == 200
        ]
    answer_s = statistics.median(durations)
    figures = offer(target, GUESSED_LOAD * NUM_SEATS / answer_s, answer_s, CAPACITY_S, seed=0)
    return figures["goodput"] / MEAN_TOKENS, answer_s


def offer(target: Target, rate: float, answer_s: float, seconds: float, *, seed: int) -> dict[str, float]:
    """Offer a load, and return its figures after a ramp."""
    rng = Random(seed)
    ramp_s = 1.5 * answer_s + MAX_WAIT_S
    span_s = ramp_s + seconds
    at_s = sorted(
        rng.uniform(begin, begin + part_s)
        for begin, part_s in ((0.0, ramp_s), (ramp_s, seconds))
        for _ in range(round(rate * part_s))
    )
    num, num_lengths = len(at_s), MOST_TOKENS - LEAST_TOKENS + 1
    lengths = rng.sample([LEAST_TOKENS + index * num_lengths // num for index in range(num)], num)
    asked = ask(target, at_s, lengths, span_s + TTFT_S + 2 * answer_s + 5.0, (ramp_s, span_s))
    return figures_of(asked.report, ramp_s, seconds) | {
        f"{name}_processor": spent_s / seconds for name, spent_s in asked.processor_s.items()
    }


class Asked(msgspec.Struct, frozen=True):
    """A client's report, and the processor time of each process, in seconds."""

    report: Report
    processor_s: dict[str, float]


def ask(
    target: Target, at_s: list[float], lengths: list[int], until_s: float, counted: tuple[float, float] | None = None
) -> Asked:
    """Offer requests from another process.

    Args:
        target: The server.
        at_s: Time of each request.
        lengths: Tokens of each answer.
        until_s: Time at which requests in flight are given up.
        counted: The time from and to which processor time is counted.
    """
    plan = Plan(
        host=target.host,
        port=target.port,
        models=["demo", *demo_adapters()],
        at_s=at_s,
        num_tokens=lengths,
        until_s=until_s,
    )
    command = [sys.executable, str(Path(__file__).with_name("open_loop.py"))]
    spent_s: dict[str, float] = {}
    with tempfile.NamedTemporaryFile() as file:
        client = subprocess.Popen([*command, file.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(msgspec.json.encode(plan))
        client.stdin.close()
        client.stdout.readline()  # it begins
        if counted is not None:
            time.sleep(counted[0])
            before = processor_s(target, client.pid)
            time.sleep(counted[1] - counted[0])
            after = processor_s(target, client.pid)
            spent_s = {name: after[name] - before[name] for name in before}
        if client.wait() != 0:
            raise SystemExit("the client failed")
        return Asked(msgspec.json.decode(file.read(), type=Report), spent_s)


def processor_s(target: Target, client: int) -> dict[str, float]:
    """Return the processor time of the client, the API process and the engine so far, in seconds."""
    of = {"client": [psutil.Process(client)], "api": [psutil.Process(target.process.pid)], "engine": target.engines()}
    return {name: sum(sum(one.cpu_times()[:2]) for one in processes) for name, processes in of.items()}


def shown(figures: dict[str, float]) -> str:
    """Return figures in a line."""
    return " ".join(f"{name}={value:.4g}" for name, value in figures.items())


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
        "client_late_p99_s": percentile([one.sent_at - one.due_at for one in steady], 99),
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
        "at P99 in every round. The last columns are processor time, in shares of one processor. "
        "`python bench/overload.py`",
    ]
    heads = ["load", "offered, requests/s", "goodput, tokens/s", "share of the highest", "429", "429 P99, ms"]
    heads += ["TTFT P99, s", "late", "429 without Retry-After", "other", "client late P99, ms"]
    heads += ["client", "API", "engine", "within the goals"]
    for name, server in figures["servers"].items():
        rounds = server["rounds"]
        best = [max(rounds[load][number]["goodput"] for load in LOADS) for number in range(options.rounds)]
        rows, missed = [], []
        for load in LOADS:
            of = {key: [one[key] for one in rounds[load]] for key in rounds[load][0]}
            share = ratio_by_round(of["goodput"], best)
            refusal_s = max(of["refusal_p99_s"])
            is_met = share.median >= LEAST_SHARE and not refusal_s > MOST_REFUSAL_S  # NaN where none was refused
            if max(of["client_late_p99_s"]) > MOST_LATE_S:
                missed.append(f"The client was late at {load}x: the load was lower than it says.")
            rows.append(
                [
                    f"{load}x",
                    f"{statistics.median(of['offered']):.0f}",
                    f"{statistics.median(of['goodput']):.0f}",
                    f"{share.median:.3f} ({share.low:.3f} to {share.high:.3f})",
                    f"{sum(of['refused']):.0f}",
                    f"{refusal_s * 1e3:.1f}",
                    f"{max(of['ttft_p99_s']):.2f}",
                    f"{sum(of['late']):.0f}",
                    f"{sum(of['without_retry_after']):.0f}",
                    f"{sum(of['other']):.0f}",
                    f"{max(of['client_late_p99_s']) * 1e3:.1f}",
                    *(f"{statistics.median(of[f'{one}_processor']):.0%}" for one in ("client", "api", "engine")),
                    "yes" if is_met else "**no**",
                ]
            )
        per_s = server["requests_per_s"]
        lines += ["", f"## {name}", "", f"Capacity: {per_s:.1f} requests a second, {per_s * MEAN_TOKENS:.0f} tokens/s."]
        lines += [*missed, "", *table(heads, rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
