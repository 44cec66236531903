"""`manylora functions serve` under load, while its processes are killed at random.

    python bench/functions_chaos.py [--quick] [--minutes 30] [--every 15] [--functions 8] [--callers 4]

Two backbones, functions on both. Callers ask one request after the other. Every ``--every`` seconds on average one
process gets SIGKILL: the controller, the agent, the process that holds a base, a zygote, or a function.

* Every request ends: with its answer, equal to that of a plain engine; with an error of the server; or with a
  connection that breaks, when the agent itself was killed. None hangs, and none has a wrong answer.
* The ledger adds up to the machine's time exactly, and covers the time of the test.
* When the service has stopped, no process is left and no sealed memory.

Writes `results/functions_chaos.json` and `.md`. As root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from functions_rig import (
    PATIENCE_S,
    Asked,
    Service,
    ask,
    in_folder,
    make_platform,
    plain_answers,
    sealed_memory,
    serving,
)
from publishing import arguments, publish, table

from manylora.lab.bench.rounds import machine

KINDS = ("controller", "agent", "holder", "zygote", "function")


async def kill_one(service: Service, kind: str, rng: Random) -> str | None:
    """Kill a process of a kind; return its kind if there was one."""
    seen = await service.overview()
    if seen is None or not seen["nodes"]:
        return None
    node = seen["nodes"][0]
    pids = {
        "controller": [seen["pid"]],
        "agent": [node["pid"]],
        "holder": [one["pid"] for one in node["backbones"] if one["pid"]],
        "zygote": [one["zygote_pid"] for one in node["backbones"] if one["zygote_pid"]],
        "function": [row["state"]["pid"] for row in seen["functions"] if row["state"].get("pid")],
    }[kind]
    ours = {one.pid for one in psutil.Process().children(recursive=True)}
    pids = [pid for pid in pids if pid in ours or kind in ("holder", "zygote", "function")]
    if not pids or not node["is_up"]:
        return None
    try:
        os.kill(rng.choice(pids), signal.SIGKILL)
    except ProcessLookupError:
        return None
    return kind


async def chaos(service: Service, names: list[str], options: Any) -> tuple[list[Asked], Counter[str]]:
    """Return the outcomes of all requests, and the kills."""
    rng = Random(0)
    until = time.monotonic() + 60 * options.minutes
    answers: list[Asked] = []
    kills: Counter[str] = Counter()

    async def call(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until:
            asked = await ask(client, service.url, rng.choice(names))
            answers.append(asked)
            if asked.error or asked.broken:
                await asyncio.sleep(0.5)

    async def kill() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1.0 / options.every))
            kills[await kill_one(service, rng.choice(KINDS), rng) or "(none there)"] += 1

    killing = asyncio.create_task(kill())
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        await asyncio.gather(*(call(client) for _ in range(options.callers)))
    killing.cancel()
    return answers, kills


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    """Return all figures."""
    names = make_platform(folder, options.functions, num_backbones=2, node="keep-alive-s = 60.0\n")
    expected = await asyncio.to_thread(plain_answers, folder, names)
    sealed: set[int] = set()  # of this service: others may run on the machine
    async with serving(folder) as service:
        for name in names[:2]:  # both backbones are loaded
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                await ask(client, service.url, name)
        sealed |= sealed_memory(one.pid for one in service.processes())
        began_s, began_used_s = service.ledger_clock()
        answers, kills = await chaos(service, names, options)
        await asyncio.sleep(2.0)
        sealed |= sealed_memory(one.pid for one in service.processes())
        ended_s, ended_used_s = service.ledger_clock()
        behind_s = time.time() - ended_s
        mine = {one.pid for one in service.processes()}
        code = await service.stop()
        bill = service.bill()
    deadline = time.monotonic() + 10.0
    while (left := sealed_memory() & sealed) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    alive = set()
    for pid in mine:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.add(pid)
    whole = [one for one in answers if not (one.error or one.broken)]
    return {
        "machine": machine(),
        "minutes": options.minutes,
        "kills": dict(kills),
        "requests": len(answers),
        "answered": len(whole),
        "wrong answers": sum(one.tokens != expected[one.name] for one in whole),
        "errors of the server": sum(one.error is not None for one in answers),
        "connections that broke": sum(one.broken is not None for one in answers),
        "hung": sum(one.took_s >= PATIENCE_S for one in answers),
        "errors": dict(Counter(one.error or one.broken for one in answers if one.error or one.broken).most_common(20)),
        "longest request, s": max(one.took_s for one in answers),
        "exit code": code,
        "ledger adds up": bill.adds_up,
        "time of all accounts in the test, s": ended_used_s - began_used_s,
        "time between the same reports by the clock, s": ended_s - began_s,
        "ledger behind the clock, s": behind_s,
        "without an agent, s": bill.machines.lost_ns / 1e9,
        "processes left": len(alive),
        "sealed bases": len(sealed),
        "sealed bases left": len(left),
    }


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    lines = ["# Functions whose processes are killed", ""]
    lines += table(("killed", "times"), figures["kills"].items())
    shown = [(key, value) for key, value in figures.items() if key not in ("machine", "kills", "errors")]
    lines += ["", *table(("", "value"), shown), ""]
    lines += table(("error, the most frequent ones", "requests"), figures["errors"].items())
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, quick="four functions and two minutes")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills, on average")
    parser.add_argument("--functions", type=int, default=8)
    parser.add_argument("--callers", type=int, default=4)
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.functions = 2.0, 4
    figures = in_folder(partial(measure, options))
    publish("functions_chaos", figures, text(figures), is_kept=not options.quick)


if __name__ == "__main__":
    main()
