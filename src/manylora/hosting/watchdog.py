"""Notices an engine that hangs without dying: a deadlock, a device that never answers, a library that spins.

Every few seconds the loop is asked for its counters, through the same queue as every command. No answer means that the
loop makes no turn; answers that show requests running and the same number of steps again and again mean that the device
does not finish one. Either way no request would get another token, and a process that dies helps its users more
than one that does not: the keeper kills it and starts the next.
"""

from __future__ import annotations

import asyncio

from manylora.hosting.client import EngineClient

__all__ = ["wait_until_hung"]

LOOKS = 10
"""How often the engine is looked at within its timeout."""

MOST_PAUSE_S = 5.0


async def wait_until_hung(client: EngineClient, timeout_s: float) -> str:
    """Return, in words how, once an engine has not moved for ``timeout_s`` seconds; until then, or its death, wait.

    Raises:
        EngineDead: It died, which is not for this to deal with.
    """
    now = asyncio.get_running_loop().time
    num_steps, moved_at = -1, now()
    while True:
        try:
            stats, _ = await asyncio.wait_for(client.snapshot(0), timeout_s)
        except TimeoutError:
            return f"it hangs: its loop made no turn for {timeout_s:g} s"
        if stats.num_steps != num_steps or not stats.num_running:
            num_steps, moved_at = stats.num_steps, now()
        elif now() - moved_at >= timeout_s:
            return f"it hangs: with {stats.num_running} requests running, no step ended for {timeout_s:g} s"
        await asyncio.sleep(min(MOST_PAUSE_S, timeout_s / LOOKS))
