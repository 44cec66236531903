"""What a function costs by the ledger when its device is kept by its rent, and when it is kept for a minute.

    python bench/functions_keeping.py [--quick] [--rounds 5]

Two services of one random Llama of about 300 MB in float32, each with one function, on the CPU. Both get the same
sessions: ten seconds of five requests a second, then no request for seventy seconds. *rent* is the default. *minute* is
what the default was: `keep-alive-s = 60`, and processes are held while there is any rate (`wait-s` so high that all
is worth its rent). The sessions of the two lie half a round apart, so that neither slows the other down. The ledger of
both charges a function that is held ready for it.

Writes `results/functions_keeping.json` and `.md`.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
from functions_rig import PATIENCE_S, Asked, Service, ask, in_folder, make_platform, serving
from publishing import arguments, publish, table
from ratios import ratio_by_round

from manylora.functions.controller.bill import PLATFORM_NAME
from manylora.functions.decisions.billing import PriceList, Usage
from manylora.lab.bench.rounds import machine

SESSION_S, PAUSE_S, RATE = 10.0, 70.0, 5.0
SYSTEMS = {"rent": ("", ""), "minute": ("keep-alive-s = 60\n", "[prices]\nwait-s = 1e6\n")}
SETTLE_S = 2.5
"""Time in which an agent's report of the end of a round is recorded."""


async def session(service: Service, seed: int) -> list[Asked]:
    """Send the requests of one session, at the same times for both services."""
    rng = Random(seed)
    times = sorted(rng.uniform(0.0, SESSION_S) for _ in range(int(SESSION_S * RATE)))
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=200)) as client:

        async def one(at: float) -> Asked:
            await asyncio.sleep(at)
            return await ask(client, service.url, "f0")

        return await asyncio.gather(*map(one, times))


def used(service: Service) -> Usage:
    """Return the use of all functions until now; the platform's is not among it."""
    lines = [line.usage for line in service.bill().lines if line.name != PLATFORM_NAME]
    return Usage(*map(sum, zip(*lines, strict=True))) if lines else Usage()


async def serve_rounds(service: Service, num_rounds: int, pause_s: float, delay_s: float) -> list[dict[str, float]]:
    """Serve rounds from ``delay_s`` on; return the figures of each."""
    loop, prices, rounds = asyncio.get_running_loop(), PriceList(), []
    began_at = loop.time() + delay_s
    before = Usage()
    for number in range(num_rounds):
        at = began_at + number * (SESSION_S + pause_s)
        await asyncio.sleep(at - loop.time())
        if not number:
            before = used(service)
        answers = await session(service, number)
        if failed := [one for one in answers if one.ttft_s is None]:
            raise SystemExit(f"{len(failed)} of {len(answers)} requests failed: {failed[0].error or failed[0].broken}")
        await asyncio.sleep(at + SESSION_S + pause_s - SETTLE_S / 2 - loop.time())
        after = used(service)
        parts = {name: new - old for name, new, old in zip(Usage._fields, after, before, strict=True)}
        before = after
        ttft = [one.ttft_s for one in answers if one.ttft_s is not None]
        e2e_s, cost = statistics.mean(one.took_s for one in answers), prices.cost(Usage(**parts))
        rounds.append(
            {
                "cost": cost,
                "idle_s": parts["idle_device_ns"] / 1e9,
                "active_s": parts["active_device_ns"] / 1e9,
                "ttft_mean": statistics.mean(ttft),
                "ttft_p50": statistics.median(ttft),
                "ttft_p99": float(np.quantile(ttft, 0.99)),
                "e2e_mean": e2e_s,
                "effectiveness": 1.0 / (e2e_s * cost),
            }
        )
    return rounds


async def measure(folder: Path, num_rounds: int, pause_s: float) -> dict[str, Any]:
    """Serve both systems, half a round apart."""
    folders = {}
    folder.chmod(0o755)  # a function's process has a user of its own
    for name, (node, prices) in SYSTEMS.items():
        folders[name] = folder / name
        folders[name].mkdir()
        make_platform(folders[name], 1, node=node)
        with (folders[name] / "functions.toml").open("a") as file:
            file.write(prices)
    async with serving(folders["rent"]) as rent, serving(folders["minute"]) as minute:
        for service in (rent, minute):  # the base is loaded
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                await ask(client, service.url, "f0")
        half_s = (SESSION_S + pause_s) / 2
        found = await asyncio.gather(
            serve_rounds(rent, num_rounds, pause_s, 0.0), serve_rounds(minute, num_rounds, pause_s, half_s)
        )
    return dict(zip(SYSTEMS, found, strict=True))


def rows(found: dict[str, Sequence[dict[str, float]]]) -> list[tuple[object, ...]]:
    """Return the medians of both systems, and the ratio of each round."""
    lines: list[tuple[object, ...]] = []
    for figure in next(iter(found.values()))[0]:
        rent, minute = ([one[figure] for one in found[name]] for name in SYSTEMS)
        median = [f"{statistics.median(one):.4g}" for one in (rent, minute)]
        lines.append((figure, *median, str(ratio_by_round(rent, minute))))
    return lines


def main() -> None:
    parser = arguments(__doc__, quick="two rounds with short pauses")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_rounds, pause_s = (2, 12.0) if options.quick else (options.rounds, PAUSE_S)
    found = in_folder(lambda folder: measure(folder, num_rounds, pause_s))
    where = machine()
    lines = [
        "# A function's device, kept by its rent and for a minute",
        "",
        f"{num_rounds} rounds of {SESSION_S:g} s with {RATE:g} requests a second and {pause_s:g} s without, on"
        f" {where['cores']} cores of {where['cpu']}.",
        "Dollars and seconds of a round; ratios are taken round by round, with a 95 % interval of their median.",
        "",
        *table(("figure", "rent", "minute", "ratio"), rows(found)),
    ]
    publish("functions_keeping", {"machine": where, "rounds": found}, "\n".join(lines), is_kept=not options.quick)


if __name__ == "__main__":
    main()
