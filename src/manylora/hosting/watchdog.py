"""Detect an engine that hangs: a deadlock, a device that does not answer, an endless loop in a library.

Every few seconds the engine's loop is asked for its counters, as by any command. Without an answer the loop makes no
turn. If requests run and the number of steps stays the same, the device does not finish a step. In both cases no
request gets another token, and the keeper kills the engine and starts the next.
"""

from __future__ import annotations

import asyncio

from manylora.hosting.client import EngineClient

__all__ = ["wait_until_hung"]

NUM_CHECKS = 10
"""Checks of the engine within its timeout."""

MAX_PAUSE_S = 5.0


async def wait_until_hung(client: EngineClient, timeout_s: float) -> str:
    """Wait until an engine has made no progress for ``timeout_s`` seconds; return the reason, in words.

    Raises:
        EngineDead: The engine died.
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
        await asyncio.sleep(min(MAX_PAUSE_S, timeout_s / NUM_CHECKS))
