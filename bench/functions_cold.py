"""Cold starts of `manylora functions serve`, and a thousand functions under Zipf traces.

    python bench/functions_cold.py [--quick] [--functions 1000] [--awake 16] [--minutes 6] [--rates 1,2] [--rounds 20]

A random Llama of about 300 MB in float32, and an adapter of rank 8 for each function, on the CPU.

* *starts*: from the request to its first token, over HTTP: from *nothing* (no base in memory); from the *backbone* (its
  agent was killed, the base is held); from the *zygote*; and of a function that is *awake*. The stages are those that
  `manylora functions ps` shows;
* *trace*: Poisson arrivals at each rate, functions by Zipf's law, and memory for about ``--awake`` of them. Every
  answer is compared with that of one plain engine with their adapters. Clients, server and functions share the
  processors, and how busy these are is shown.

Writes `results/functions_cold.json` and `.md`. As root, which alone can give each function a user of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import psutil
from functions_rig import MIB, PATIENCE_S, Asked, Service, ask, in_folder, make_platform, plain_answers, serving
from publishing import arguments, publish, table

from manylora.lab.bench.rounds import machine

GOAL_MS = 300
ZIPF = 1.0
BASE_MIB = 330
ZYGOTE_MIB = 340
FUNCTION_MIB = 70
_NUMBERS = re.compile(r"(?<![\w])-?\d{4,}|'f\d+'")
"""What differs between errors of one kind."""

AT_ONCE = 8
"""Requests that the plain engine answers together."""


async def stages_of(service: Service, name: str) -> dict[str, float]:
    """Return the stages of a function's last start, once the agent has reported them with the first token."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        seen = await service.overview()
        for row in [] if seen is None else seen["functions"]:
            start = row["state"].get("last_start")
            if row["name"] == name and start is not None and start["first_token_s"] is not None:
                return {**start["stages_s"], "first token": start["first_token_s"]}
        await asyncio.sleep(0.2)
    raise SystemExit(f"no start of {name} was reported")


async def starts(service: Service, client: httpx.AsyncClient, names: list[str], num_rounds: int) -> dict[str, Any]:
    """Return times to first token and stages, by kind of start."""
    found: dict[str, Any] = {
        kind: {"ttft_s": [], "stages_s": []} for kind in ("nothing", "backbone", "zygote", "awake")
    }
    fresh = iter(names)

    async def one(kind: str, name: str, *, is_start: bool = True) -> None:
        asked = await ask(client, service.url, name)
        if asked.ttft_s is None:
            raise SystemExit(f"{name}: {asked.error or asked.broken}")
        found[kind]["ttft_s"].append(asked.ttft_s)
        if is_start:
            found[kind]["stages_s"].append(await stages_of(service, name))

    await one("nothing", next(fresh))
    for _ in range(num_rounds):
        name = next(fresh)
        await one("zygote", name)
        await one("awake", name, is_start=False)
    for _ in range(min(3, num_rounds)):
        seen = await service.overview()
        assert seen is not None
        os.kill(seen["nodes"][0]["pid"], signal.SIGKILL)
        name = next(fresh)
        while (await ask(client, service.url, "no-such-function")).broken:
            await asyncio.sleep(0.1)  # the next agent listens
        await one("backbone", name)
    return found


def arrivals(names: list[str], rate: float, options: Any) -> list[tuple[float, str]]:
    """Return the requests of a trace: when, and to which function."""
    rng = Random(0)
    weights = [1.0 / (rank + 1) ** ZIPF for rank in range(len(names))]
    shuffled = rng.sample(names, len(names))
    found: list[tuple[float, str]] = []
    at = rng.expovariate(rate)
    while at < 60 * options.minutes:
        found.append((at, rng.choices(shuffled, weights)[0]))
        at += rng.expovariate(rate)
    return found


async def trace(
    service: Service, client: httpx.AsyncClient, wanted: Sequence[tuple[float, str]]
) -> tuple[list[Asked], list[dict[str, float]]]:
    """Return the outcome of every request, and samples of memory."""
    samples: list[dict[str, float]] = []
    psutil.cpu_percent()  # the next call tells of the time since this one
    began = time.monotonic()

    async def watch() -> None:
        while True:
            seen = await service.overview()
            awake = 0 if seen is None else sum(row["state"]["state"] == "awake" for row in seen["functions"])
            pss = await asyncio.to_thread(service.pss_bytes)
            busy = psutil.cpu_percent() / 100
            samples.append({"at_s": time.monotonic() - began, "awake": awake, "pss_mib": pss / MIB, "busy": busy})
            await asyncio.sleep(5.0)

    async def request(at: float, name: str) -> Asked:
        await asyncio.sleep(began + at - time.monotonic())
        return await ask(client, service.url, name)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(*(request(*one) for one in wanted))
    watching.cancel()
    return answers, samples


def wrong_answers(folder: Path, answers: Sequence[Asked], expected: dict[str, list[str]]) -> int:
    """Return the answers that are not the plain engine's.

    Those of its answers that were computed in a batch and differ are asked for again, each alone.
    """
    whole = [one for one in answers if not (one.error or one.broken)]
    differ = sorted({one.name for one in whole if one.tokens != expected[one.name]})
    expected = expected | (plain_answers(folder, differ) if differ else {})
    return sum(one.tokens != expected[one.name] for one in whole)


def summary(answers: list[Asked], samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of a trace."""
    ttft = [one.ttft_s for one in answers if one.ttft_s is not None]
    half = len(samples) // 2
    return {
        "requests": len(answers),
        "functions": len({one.name for one in answers}),
        "ttft_p50_s": float(np.percentile(ttft, 50)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "errors": Counter(_NUMBERS.sub("#", reason) for one in answers if (reason := one.error or one.broken)),
        "processors_busy": statistics.fmean(one["busy"] for one in samples[1:] or samples),
        "awake_median": statistics.median(one["awake"] for one in samples),
        "pss_mib_median_first_half": statistics.median(one["pss_mib"] for one in samples[: half or 1]),
        "pss_mib_median_second_half": statistics.median(one["pss_mib"] for one in samples[half:]),
        "pss_mib_max": max(one["pss_mib"] for one in samples),
    }


def _shown(value: Any) -> str:
    if isinstance(value, Counter):
        return "; ".join(f"{count} x {reason}" for reason, count in value.items()) or "none"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    lines = ["# Cold starts of isolated functions", ""]
    rows = []
    for kind, one in figures["starts"].items():
        if one["ttft_s"]:
            ttft = [1000 * value for value in one["ttft_s"]]
            rows.append((kind, len(ttft), f"{statistics.median(ttft):.0f}", f"{np.percentile(ttft, 99):.0f}"))
    lines += [*table(("start from", "rounds", "first token P50, ms", "P99, ms"), rows), ""]
    stages = list(figures["starts"]["zygote"]["stages_s"][0])
    rows = [
        (
            kind,
            *(f"{1000 * statistics.median(stage.get(name, 0.0) for stage in one['stages_s']):.0f}" for name in stages),
        )
        for kind, one in figures["starts"].items()
        if one["stages_s"]
    ]
    lines += [*table(("stages, P50 in ms", *stages), rows), ""]
    zygote = figures["starts"]["zygote"]["stages_s"]
    ready = 1000 * statistics.median(sum(one.values()) - one["first token"] for one in zygote)
    lines += [f"From the sealed backbone to an engine that takes requests: {ready:.0f} ms (goal: {GOAL_MS}).", ""]
    traces = figures["traces"]
    shown = [(key, *(_shown(one[key]) for one in traces.values())) for key in next(iter(traces.values()))]
    lines += table(("trace", *(f"{rate} requests/s" for rate in traces)), shown)
    return "\n".join(lines)


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    """Return all figures."""
    room = (BASE_MIB + ZYGOTE_MIB + options.awake * FUNCTION_MIB) * MIB
    names = make_platform(folder, options.functions, node=f"memory-bytes = {room}\nkeep-alive-s = 600.0\n")
    wanted = {rate: arrivals(names, rate, options) for rate in options.rates}
    asked = list(dict.fromkeys(name for requests in wanted.values() for _, name in requests))
    expected = await asyncio.to_thread(plain_answers, folder, asked, at_once=AT_ONCE)
    limits = httpx.Limits(max_connections=None)
    figures: dict[str, Any] = {"machine": machine(), "is_root": os.geteuid() == 0, "traces": {}, "samples": {}}
    answers: dict[float, list[Asked]] = {}
    async with serving(folder) as service, httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        figures["starts"] = await starts(service, client, names, options.rounds)
        for rate, requests in wanted.items():
            answers[rate], figures["samples"][rate] = await trace(service, client, requests)
            figures["traces"][rate] = summary(answers[rate], figures["samples"][rate])
        await service.stop()
        bill = service.bill()
        use = bill.machines
        figures["ledger"] = {"adds_up": bill.adds_up, "device_s": use.device_ns / 1e9, "lost_s": use.lost_ns / 1e9}
    for rate, seen in figures["traces"].items():
        seen["wrong"] = await asyncio.to_thread(wrong_answers, folder, answers[rate], expected)
        seen["different_answers_expected"] = len({tuple(expected[one.name]) for one in answers[rate]})
    return figures


def rates(text: str) -> list[float]:
    """Return numbers that commas separate."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, quick="eight functions, two rounds and twenty seconds of the trace")
    parser.add_argument("--functions", type=int, default=1000)
    parser.add_argument("--awake", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--rates", type=rates, default=[1.0, 2.0], help="requests per second of each trace")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.quick:
        options.functions, options.awake, options.minutes, options.rounds = 8, 4, 1 / 3, 2
    figures = in_folder(partial(measure, options))
    publish("functions_cold", figures, text(figures), is_kept=not options.quick)


if __name__ == "__main__":
    main()
