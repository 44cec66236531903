"""Reports of `fleet_chaos.py` that are read all the time, adapters that are unloaded in use, ends without a cause.

A report of an adapter that is gone, whose answers go on elsewhere, must not harm the engines that it is about.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from random import Random

import aiohttp
from fleet_account import Asked, Chaos, ask
from fleet_faults import send
from fleet_rig import Command

__all__ = ["STRANDED", "ask_lone", "check_ends", "read", "strand"]

STRANDED = "stranded"
"""The adapter that is unloaded under its streams."""

OF_ALL = ("/metrics", "/status", "/v1/models", "/health")
OF_SERVERS = (*OF_ALL, "/status?adapters=1", "/adapters", f"/adapters/{STRANDED}", "/load", "/server_info", "/version")
NUM_STREAMS = 12
NUM_TOKENS = 120

ENDED = re.compile(r"engine process (\d+) (?:was killed by|ended with)|engine_hangs pid=(\d+)")
BROKEN = re.compile(r".*(?:engine_broke|snapshot_failed|lost the connection to engine process).*")


async def read(chaos: Chaos, session: aiohttp.ClientSession, way: Command, rng: Random) -> None:
    """Read one report after another; each is answered, or says that no engine serves."""
    paths = OF_ALL if way is chaos.router else OF_SERVERS
    answered: set[str] = set()
    while not chaos.is_over:
        path = rng.choice(paths)
        began = time.monotonic()
        try:
            async with session.get(way.url + path) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await asyncio.sleep(1.0)  # the gap is noted when the process is back
            is_due = not way.is_running or way.was_away(began - 1.0, time.monotonic())
            chaos.check(is_due or not isinstance(error, TimeoutError), f"{way.name} {path}: {error!r}")
            continue
        answered |= {path} if answer.status in (200, 404) else set()
        is_dead = answer.status == 500 and "engine" in text and "could not be read" not in text
        chaos.check(
            is_dead or answer.status in (200, 404, 502, 503), f"{way.name} {path}: {answer.status} {text[:200]}"
        )
        await asyncio.sleep(rng.expovariate(4.0))
    chaos.check(len(answered) == len(paths), f"{way.name}: no answer to {set(paths) - answered}")


async def ask_lone(chaos: Chaos, session: aiohttp.ClientSession, asked: Asked) -> None:
    """Ask the adapter that is loaded under no other name: after an unload no name at all refers to its content."""
    path = chaos.folder / "churn" / STRANDED
    load = {"lora_name": STRANDED, "lora_path": str(path), "load_inplace": True}
    assert await change(chaos, session, asked.way, "load", load)
    await ask(session, asked, STRANDED)
    assert await change(chaos, session, asked.way, "unload", {"lora_name": STRANDED})


async def strand(chaos: Chaos, session: aiohttp.ClientSession, every_s: float, rng: Random) -> None:
    """Unload an adapter under its streams and kill an engine that runs them, again and again."""
    path = chaos.folder / "churn" / STRANDED
    while not chaos.is_over:
        await asyncio.sleep(rng.expovariate(1.0 / every_s))
        server = rng.choice(chaos.servers)
        load = {"lora_name": STRANDED, "lora_path": str(path), "load_inplace": True}
        if not await change(chaos, session, server, "load", load):
            continue
        asked = [Asked(server, [STRANDED], None, NUM_TOKENS, time.monotonic()) for _ in range(NUM_STREAMS)]
        chaos.asked += asked
        streams = [asyncio.create_task(ask(session, one, STRANDED)) for one in asked]
        while not all(one.text or one.ended for one in asked):
            await asyncio.sleep(0.02)
        is_gone = await change(chaos, session, server, "unload", {"lora_name": STRANDED})
        chaos.faults["adapter unloaded in use"] += is_gone
        if is_gone and send(chaos, signal.SIGKILL, [server]) is not None:
            chaos.faults["engine killed"] += 1
        await asyncio.gather(*streams)


async def change(
    chaos: Chaos, session: aiohttp.ClientSession, server: Command, verb: str, body: dict[str, object]
) -> bool:
    """Load or unload the adapter; return whether that was done."""
    try:
        async with session.post(f"{server.url}/v1/{verb}_lora_adapter", json=body) as answer:
            await answer.read()
            outcome = str(answer.status)
    except (aiohttp.ClientError, TimeoutError, OSError):
        outcome = "cut"
    chaos.admin[f"{verb} {outcome}"] += 1
    return outcome == "200"


def check_ends(chaos: Chaos) -> None:
    """Note every engine that ended without having been killed or stopped, and every report that failed in one."""
    for server in chaos.servers:
        log = server.log.read_text(errors="replace")
        ended = {int(first or second) for first, second in ENDED.findall(log)}
        alone = sorted(ended - chaos.signalled)
        chaos.check(not alone, f"{server.name}: engines {alone} ended, and were not killed")
        for line in BROKEN.findall(log):
            chaos.check(False, f"{server.name}: {line[:300]}")
