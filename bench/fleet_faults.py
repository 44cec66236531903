"""The faults of `fleet_chaos.py`: one after another, each over before the next one begins."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil
from fleet_account import Chaos
from fleet_rig import Command, Link

__all__ = ["HANG_S", "disturb", "send"]

HANG_S = 5.0
"""Time without progress after which the watchdog ends an engine."""


async def kill_engine(chaos: Chaos) -> bool:
    return send(chaos, signal.SIGKILL) is not None


async def hang_engine(chaos: Chaos) -> bool:
    return send(chaos, signal.SIGSTOP) is not None


async def pause_engine(chaos: Chaos) -> bool:
    stopped = send(chaos, signal.SIGSTOP)
    await asyncio.sleep(chaos.rng.uniform(0.2, 0.5 * HANG_S))
    with contextlib.suppress(psutil.Error):
        if stopped is not None:
            stopped.resume()
    return stopped is not None


def send(chaos: Chaos, number: signal.Signals, servers: Sequence[Command] = ()) -> psutil.Process | None:
    """Send a signal to an engine, of any server or of some; return it if there was one."""
    engines = [one for server in servers or chaos.servers if server.is_running for one in server.engines()]
    if not engines:
        return None
    engine = chaos.rng.choice(engines)
    chaos.signalled.add(engine.pid)
    with contextlib.suppress(psutil.Error):
        engine.send_signal(number)
        return engine
    return None


async def kill_server(chaos: Chaos) -> bool:
    server = chaos.rng.choice(chaos.servers)
    async with server.away():
        engines = server.engines()
        await server.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, engines, 15.0)
        chaos.check(not alive, f"{len(alive)} engines outlived {server.name}")
        await server.start()
    return True


async def restart_server(chaos: Chaos) -> bool:
    server = chaos.rng.choice(chaos.servers)
    async with server.away():
        code = await server.stop()
        chaos.check(code == 0, f"{server.name} ended with {code} after SIGTERM")
        await server.start()
    return True


async def kill_router(chaos: Chaos) -> bool:
    async with chaos.router.away():
        await chaos.router.kill()
        await chaos.router.start()
    chaos.routed.forget()
    return True


async def replace_router(chaos: Chaos) -> bool:
    async with chaos.router.away():
        code = await chaos.router.replace()
        chaos.check(code == 0, f"the router ended with {code} after SIGTERM")
    chaos.routed.forget()
    return True


async def break_link(chaos: Chaos) -> bool:
    link = chaos.rng.choice(chaos.links)
    link.fault = chaos.rng.choice(Link.FAULTS)
    async with contextlib.AsyncExitStack() as stack:
        if link.fault == "half":  # an answer that ends within an event can only be broken off
            await stack.enter_async_context(chaos.router.away())
        await asyncio.sleep(chaos.rng.uniform(1.0, 6.0))
        link.fault = ""
    return True


async def fill_disk(chaos: Chaos) -> bool:
    if not chaos.disk.can_change:
        return False
    chaos.disk.fill()
    chaos.check(chaos.disk.is_full, "the disk was not full")
    await asyncio.sleep(chaos.rng.uniform(2.0, 10.0))
    chaos.disk.free()
    return True


async def jump_clock(chaos: Chaos) -> bool:
    chaos.clock.jump(chaos.rng.uniform(-1.0, 1.0) * 36_000)
    return True


FAULTS: dict[str, tuple[Callable[[Chaos], Awaitable[bool]], float]] = {
    "engine killed": (kill_engine, 3.0),
    "engine stopped and continued": (pause_engine, 2.0),
    "engine stopped": (hang_engine, 2.0),
    "server killed": (kill_server, 1.0),
    "server ended and started": (restart_server, 1.0),
    "router killed": (kill_router, 1.0),
    "router replaced": (replace_router, 1.0),
    "link with a fault": (break_link, 5.0),
    "disk full": (fill_disk, 1.0),
    "clock jumped": (jump_clock, 1.0),
}
"""Faults by name, and how often each is chosen."""


async def disturb(chaos: Chaos, every_s: float) -> None:
    """Cause one fault after another; each ends before the next one begins."""
    weights = [weight for _, weight in FAULTS.values()]
    while not chaos.is_over:
        await asyncio.sleep(min(chaos.rng.expovariate(1.0 / every_s), max(0.0, chaos.ends_at - time.monotonic())))
        if not chaos.is_over:
            (name,) = chaos.rng.choices(list(FAULTS), weights)
            began = time.monotonic()
            chaos.faults[name] += await FAULTS[name][0](chaos)
            print(f"{began - chaos.began:.1f} s: {name}, {time.monotonic() - began:.1f} s", flush=True)
