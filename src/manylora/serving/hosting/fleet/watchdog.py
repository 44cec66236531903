"""Detect an engine that hangs: a deadlock, a device that does not answer, an endless loop in a library.

Every few seconds the engine's loop is asked for its counters, as by any command. Without an answer the loop makes no
turn. If requests run and the number of steps stays the same, the device does not finish a step. In both cases no
request gets another token, and the keeper kills the engine and starts the next.

Time in which this process could not listen is not counted: an event loop that was blocked, or a process that was
stopped, says nothing about the engine. So every wait is made of slices, and a slice counts at most its own length.
"""

from __future__ import annotations

import asyncio
from typing import Any

from manylora.core.engine.status import EngineStats
from manylora.core.errors import SnapshotFailed
from manylora.serving.hosting.links.client import EngineClient

__all__ = ["wait_until_hung"]

NUM_CHECKS = 10  # checks of the engine within its timeout

MAX_PAUSE_S = 5.0


async def wait_until_hung(client: EngineClient, timeout_s: float) -> str:
    """Wait until an engine has made no progress for ``timeout_s`` seconds; return the reason, in words."""
    slice_s = min(MAX_PAUSE_S, timeout_s / NUM_CHECKS)
    num_steps, unmoved_s = -1, 0.0
    while True:
        try:
            stats, waited_s = await _ask(client, timeout_s, slice_s)
        except SnapshotFailed:  # its loop makes turns; whether steps end is not known
            num_steps = -1
            await _listen(slice_s)
            continue
        if stats is None:
            return f"it hangs: its loop made no turn for {timeout_s:g} s"
        unmoved_s += waited_s
        if stats.num_steps != num_steps or not stats.num_running:
            num_steps, unmoved_s = stats.num_steps, 0.0
        elif unmoved_s >= timeout_s:
            return f"it hangs: with {stats.num_running} requests running, no step ended for {timeout_s:g} s"
        unmoved_s += await _listen(slice_s)


async def _ask(client: EngineClient, timeout_s: float, slice_s: float) -> tuple[EngineStats | None, float]:
    """Ask for the engine's counters; return them, ``None`` without an answer, and the time in which it could come."""
    answer = asyncio.ensure_future(client.snapshot(0))
    waited_s = 0.0
    try:
        while not answer.done() and waited_s < timeout_s:
            waited_s += await _listen(min(slice_s, timeout_s - waited_s), answer)
        return (answer.result()[0] if answer.done() else None), waited_s
    finally:
        answer.cancel()


async def _listen(slice_s: float, answer: asyncio.Future[Any] | None = None) -> float:
    """Wait for a slice of time, or for an answer; return the time, at most the slice."""
    now = asyncio.get_running_loop().time
    began_at = now()
    if answer is None:
        await asyncio.sleep(slice_s)
    else:
        await asyncio.wait({answer}, timeout=slice_s)
    return min(now() - began_at, slice_s)
