"""Soak: half an hour of churn, storms, hostile requests and kills; nothing is lost without an error, nothing grows.

    python bench/soak.py [--quick] [--minutes 30] [--kill-every 120] [--simulate]

The demo model on two engine processes behind one API. All at once, from one client process:

* eight clients stream one answer after another, over the base, twelve adapters and those that churn; one in eight
  leaves in the middle;
* every twenty seconds a storm of 150 requests at once;
* sixteen names are loaded, replaced in place and unloaded without end;
* the hostile requests of `tests/attack` one after another, and connections that send half a request and leave;
* the younger of the two engines gets SIGKILL. The older one lives through the run, so that its memory has a slope.

A request is *whole* (every token and the end of its stream), *refused* (a status and an error that says why), ended
with an *error* (an event in its stream), *left* (by the client), or *lost*: cut off or without an answer. Lost must be
0, and so must answers of the server's own failure (500). Every second the resident memory, descriptors and threads of
the API and of the engine that lives are noted. The slope over the second half is that of Theil and Sen over medians of
ten seconds, with its 95 % interval. Memory is flat if the second half adds at most 2 % to it at that slope, or if the
interval has zero in it; descriptors and threads are flat if the last tenth has no more than the first tenth of the
second half had at most. The page says for each goal whether it was met, and the exit code is 1 if one was not. Writes
`results/soak.json`, `.md` and `.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil
from publishing import RESULTS, arguments, publish, table

from manylora.demo import demo_adapters
from manylora.lab.bench.rounds import machine
from manylora.lab.measure.plots import new_figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "attack"))
from attack_target import MIB, SIMULATED, Target, running
from corpus import HOSTILE

NUM_CLIENTS, NUM_STORM = 8, 150
STORM_EVERY_S, STORM_PAUSE_S = 20.0, 0.2
NAMES = [f"churn-{number}" for number in range(16)]
SILENCE_S = 120.0
"""Longest silence of the server in an answer; a longer one is a lost request."""

BLOCK_S = 10.0
MOST_GROWTH = 0.02
SETTLE_S = 10.0


@dataclass
class Soak:
    """The run: its target, the outcomes, and the samples.

    Args:
        samples: For each process, its samples: seconds, resident bytes, descriptors, threads.
        faults: The first of each kind of lost or wrong answers, in words.
    """

    target: Target
    folder: Path
    ends_at: float
    began_at: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    admin: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    faults: list[str] = field(default_factory=list)
    samples: dict[str, list[tuple[float, int, int, int]]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_at

    def fault(self, text: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(text)


def main() -> None:
    """Run, and publish the figures."""
    parser = arguments(__doc__, quick="half a minute")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds between two kills")
    parser.add_argument("--simulate", action="store_true", help="simulated engines, which need no compiled kernels")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.kill_every = 0.5, 10.0
    with tempfile.TemporaryDirectory(prefix="manylora-") as name:
        folder = Path(name)
        for adapter in NAMES:
            shutil.copytree(next(iter(demo_adapters().values())), folder / "adapters" / adapter)
        limits = ["--replicas", "2", "--max-num-seqs", "32", "--max-waiting", "256"]
        limits += ["--memory", "4GiB" if options.simulate else "64MiB"]  # adapters are evicted
        limits += ["--allowed-lora-path", str(folder / "adapters"), "--header-timeout", "5"]
        limits += [f"--lora-modules={name}={path}" for name, path in demo_adapters().items()]
        with running(folder, *limits, model=SIMULATED if options.simulate else ("demo",)) as target:
            soak = Soak(target, folder / "adapters", time.monotonic() + 60.0 * options.minutes)
            try:
                asyncio.run(run(soak, options.kill_every))
            except OSError:
                print(target.log.read_text()[-4000:], file=sys.stderr)
                raise
    figures, text = summary(soak, options)
    if not options.quick:
        draw(soak, RESULTS / "soak.png")
    publish("soak", figures, text, is_kept=not options.quick)
    if not options.quick and not all(figures["goals"].values()):
        sys.exit(1)


async def run(soak: Soak, kill_every_s: float) -> None:
    """Run every worker until the time is over, then wait until the server is idle."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    url = f"http://{soak.target.host}:{soak.target.port}"
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        sampling = asyncio.create_task(sample(soak))
        workers: list[Awaitable[None]] = [client(soak, session, Random(seed)) for seed in range(NUM_CLIENTS)]
        workers += [churn(soak, session, Random(seed), NAMES[seed::2]) for seed in range(2)]
        workers += [storms(soak, session), attack(soak, session), half_requests(soak)]
        workers += [kills(soak, session, kill_every_s)]
        await asyncio.gather(*workers)
        await asyncio.sleep(SETTLE_S)
        async with session.get("/status") as answer:
            engine = (await answer.json())["engine"]
        if engine["num_running"] or engine["num_waiting"]:
            soak.fault(f"the engines still work on {engine['num_running']} and {engine['num_waiting']} requests")
        sampling.cancel()


async def ask(soak: Soak, session: aiohttp.ClientSession, rng: Random) -> None:
    """Send one request and note its end."""
    models = ["demo", *demo_adapters(), *NAMES]
    num_tokens = rng.randint(1, 60)
    body = {
        "model": rng.choice(models),
        "prompt": "ab " * rng.randint(1, 40),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    leaves_after = rng.randint(1, num_tokens) if rng.random() < 1 / 8 else None
    outcome, num_events, usage = "lost", 0, None
    try:
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                error = (await answer.json())["error"]
                outcome = "server failure" if answer.status == 500 else f"refused {answer.status}"
                if answer.status not in (404, 429, 503):
                    soak.fault(f"{answer.status}: {error}")
            async for line in answer.content:
                if answer.status != 200 or not line.startswith(b"data: "):
                    continue
                num_events += 1
                if line.startswith(b"data: [DONE]"):
                    outcome = outcome if outcome == "error" else "whole" if usage == num_tokens else "lost"
                elif b'"error"' in line:
                    outcome = "error"
                    soak.fault(line.decode()[:300])
                elif (event := json.loads(line[6:])).get("usage"):
                    usage = event["usage"]["completion_tokens"]
                if leaves_after is not None and num_events >= leaves_after:
                    outcome = "left"
                    break
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        soak.fault(f"lost: {error!r}")
    soak.outcomes[outcome] += 1


async def client(soak: Soak, session: aiohttp.ClientSession, rng: Random) -> None:
    while not soak.is_over:
        await ask(soak, session, rng)
        await asyncio.sleep(0.02)  # a server without room refuses at once


async def storms(soak: Soak, session: aiohttp.ClientSession) -> None:
    rng = Random(1)
    while not soak.is_over:
        await asyncio.gather(*(ask(soak, session, rng) for _ in range(NUM_STORM)))
        await pause(soak, STORM_EVERY_S)


async def churn(soak: Soak, session: aiohttp.ClientSession, rng: Random, names: list[str]) -> None:
    """Load, replace and unload adapters; each folder alternates between two of the demo's adapters."""
    sources = list(demo_adapters().values())
    while not soak.is_over:
        name = rng.choice(names)
        verb = rng.choice(("load", "replace", "unload"))
        path = soak.folder / name
        if verb == "replace":
            shutil.copytree(rng.choice(sources), path, dirs_exist_ok=True)
        load = {"lora_name": name, "lora_path": str(path), "load_inplace": verb == "replace"}
        way = ("/v1/unload_lora_adapter", {"lora_name": name}) if verb == "unload" else ("/v1/load_lora_adapter", load)
        try:
            async with session.post(way[0], json=way[1]) as answer:
                soak.admin[f"{verb} {answer.status}"] += 1
                if answer.status not in (200, 400, 404, 503):
                    soak.fault(f"{verb}: {answer.status} {(await answer.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            soak.admin["lost"] += 1
            soak.fault(f"{verb}: {error!r}")
        await asyncio.sleep(0.1)


async def attack(soak: Soak, session: aiohttp.ClientSession) -> None:
    """Send every hostile request, one after another; while the server has no room it may say that instead."""
    while not soak.is_over:
        for one in HOSTILE:
            try:
                headers = {"content-type": "application/json"}
                async with session.post(one.path, data=one.body, headers=headers) as answer:
                    is_expected = answer.status in (one.status, 429, 503)
                    soak.hostile["as expected" if is_expected else f"{one.slug}: {answer.status}"] += 1
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                soak.hostile[f"{one.slug}: {error!r}"] += 1
            if soak.is_over:
                return
            await asyncio.sleep(0.3)


async def half_requests(soak: Soak) -> None:
    """Open connections that send half a request; half of them leave, the server ends the others."""
    kept: list[asyncio.StreamWriter] = []
    while not soak.is_over:
        for number in range(10):
            _, writer = await asyncio.open_connection(soak.target.host, soak.target.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: app")
            if number % 2:
                writer.transport.abort()
            else:
                kept.append(writer)
        await pause(soak, 5.0)
        while len(kept) > 20:
            kept.pop(0).transport.abort()
    for writer in kept:
        writer.transport.abort()


async def kills(soak: Soak, session: aiohttp.ClientSession, every_s: float) -> None:
    """Kill the younger engine, once both serve."""
    while not soak.is_over:
        await pause(soak, every_s)
        async with session.get("/status") as answer:  # an engine that dies at its first start ends the server
            both_serve = all(one["state"] == "serving" for one in (await answer.json())["replicas"])
        engines = sorted(soak.target.engines(), key=lambda one: one.create_time())
        if not soak.is_over and both_serve and len(engines) == 2:
            engines[-1].kill()
            soak.num_kills += 1


async def pause(soak: Soak, seconds: float) -> None:
    until = min(time.monotonic() + seconds, soak.ends_at)
    await asyncio.sleep(max(0.0, until - time.monotonic()))


async def sample(soak: Soak) -> None:
    """Note the size of the API process and of the older engine every second."""
    oldest = min(soak.target.engines(), key=lambda one: one.create_time())
    watched = {"API": psutil.Process(soak.target.process.pid), "engine": oldest}
    while True:
        for name, process in watched.items():
            with process.oneshot():
                now = time.monotonic() - soak.began_at
                row = (now, process.memory_info().rss, process.num_fds(), process.num_threads())
            soak.samples.setdefault(name, []).append(row)
        await asyncio.sleep(1.0)


def slope(samples: list[tuple[float, int, int, int]], column: int) -> tuple[float, float, float]:
    """Return the slope of a column over the second half, per hour, with its interval."""
    from scipy.stats import theilslopes

    half = [row for row in samples if row[0] >= samples[-1][0] / 2]
    blocks: dict[int, list[tuple[float, float]]] = {}
    for row in half:
        blocks.setdefault(int(row[0] // BLOCK_S), []).append((row[0], row[column]))
    points = [tuple(map(statistics.median, zip(*block, strict=True))) for block in blocks.values()]
    if len(points) < 3:
        return (float("nan"),) * 3
    found = theilslopes([value for _, value in points], [at / 3600 for at, _ in points])
    return found.slope, found.low_slope, found.high_slope


def summary(soak: Soak, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the figures and the text."""
    processes = {}
    goals = {
        "nothing is lost": not soak.outcomes["lost"] + soak.admin["lost"],
        "no failure of the server": not soak.outcomes["server failure"],
        "hostile requests are refused as expected": soak.hostile["as expected"] == sum(soak.hostile.values()),
        "no work is left": not any("still work" in fault for fault in soak.faults),
    }
    rows = []
    for name, samples in soak.samples.items():
        half = [row for row in samples if row[0] >= samples[-1][0] / 2]
        memory = [value / MIB for value in slope(samples, 1)]
        files, threads = [row[2] for row in half], [row[3] for row in half]
        middle = statistics.median(row[1] for row in half[: max(1, len(half) // 10)]) / MIB
        last = statistics.median(row[1] for row in samples[-5:]) / MIB
        tenth = max(1, len(half) // 10)
        half_h = (samples[-1][0] - half[0][0]) / 3600
        goals[f"memory of {name} is flat"] = memory[0] * half_h <= MOST_GROWTH * middle or memory[1] <= 0.0
        goals[f"descriptors of {name} are flat"] = statistics.median(files[-tenth:]) <= max(files[:tenth])
        goals[f"threads of {name} are flat"] = statistics.median(threads[-tenth:]) <= max(threads[:tenth])
        processes[name] = {"memory_mib_per_h": memory, "middle_mib": middle, "last_mib": last, "samples": samples}
        rows.append(
            [
                name,
                f"{middle:.0f}",
                f"{last:.0f}",
                f"{memory[0]:+.1f} ({memory[1]:+.1f} to {memory[2]:+.1f})",
                f"{statistics.median(files):.0f} ({min(files)} to {max(files)})",
                f"{files[-1]}",
                f"{statistics.median(threads):.0f} ({min(threads)} to {max(threads)})",
            ]
        )
    heads = ["process", "MiB at half-time", "at the end", "slope of the second half, MiB/h", "descriptors (range)"]
    heads += ["at the end", "threads (range)"]
    number = sum(soak.outcomes.values())
    lines = [
        "# Soak",
        "",
        f"{options.minutes:g} minutes, {'simulated engines' if options.simulate else 'the demo model'}, two engines, "
        f"{soak.num_kills} killed; {number} requests, {sum(soak.hostile.values())} hostile ones, "
        f"{sum(soak.admin.values())} changes of adapters. `python bench/soak.py`",
        "",
        *table(["outcome", "requests"], sorted(soak.outcomes.items())),
        "",
        *table(heads, rows),
        "",
        f"Hostile requests with another answer: {sum(soak.hostile.values()) - soak.hostile['as expected']}. "
        f"Lost: {soak.outcomes['lost'] + soak.admin['lost']}. "
        f"Failures of the server: {soak.outcomes['server failure']}.",
    ]
    lines += ["", *table(["goal", "met"], [(goal, "yes" if met else "**no**") for goal, met in goals.items()])]
    lines += ["", *(f"* {fault}" for fault in soak.faults[:10])] if soak.faults else []
    figures = {
        "options": vars(options),
        "machine": machine(),
        "outcomes": soak.outcomes,
        "admin": soak.admin,
        "hostile": soak.hostile,
        "num_kills": soak.num_kills,
        "goals": goals,
        "faults": soak.faults,
        "processes": processes,
    }
    return figures, "\n".join(lines)


def draw(soak: Soak, path: Path) -> None:
    """Draw memory, descriptors and threads over time."""
    figure, columns = new_figure((14.0, 4.0), columns=3)
    for column, (axes, label) in enumerate(
        zip(columns, ("resident memory, MiB", "descriptors", "threads"), strict=True)
    ):
        unit = 1 if column else MIB
        for name, samples in soak.samples.items():
            values = [row[1 + column] / unit for row in samples]
            axes.plot([row[0] / 60 for row in samples], values, label=name, linewidth=1)
        axes.set(xlabel="minutes", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
