"""Drives simulated engines on one virtual clock: what the engine's loop is to one live engine.

::

    arrivals --dispatch--> core 0   core 1   core 2      all on one clock
                             |        |        |
                             +--- a turn of those of which an event is due, or that a request reached

A turn is the loop's: collect, take arrivals, launch, hand out. Each engine has one when an event of its own is due, so
its decisions never depend on how often another one woke the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from manylora.clock import VirtualClock
from manylora.engine.arrivals import Arrivals
from manylora.engine.core import EngineCore
from manylora.errors import Stalled
from manylora.types import Output, Request

__all__ = ["drive"]


def drive(
    cores: Seq[EngineCore],
    clock: VirtualClock,
    arrivals: Arrivals,
    *,
    dispatch: Callable[[Request], int],
    on_outputs: Callable[[list[Output], float], None],
) -> None:
    """Run until no request is left.

    Args:
        cores: The engines. Their executors know when work completes.
        clock: Jumps to the next event of any of them.
        arrivals: The requests.
        dispatch: Returns the engine that a request goes to.
        on_outputs: Takes the outputs of one engine's turn, and the time in seconds.

    Raises:
        Stalled: Requests are left and nothing is pending that could move them.
    """
    is_due = [False] * len(cores)

    def reach(request: Request) -> EngineCore:
        index = dispatch(request)
        is_due[index] = True
        return cores[index]

    now = clock.now()
    while True:
        collected = [core.collect(now) for core, due in zip(cores, is_due, strict=True) if due]
        arrivals.hand_over(now, reach)
        for core, due in zip(cores, is_due, strict=True):
            if due:
                core.launch(now)
        for outputs in collected:
            if outputs:
                on_outputs(outputs, now)
        events = [core.next_event_at() for core in cores]
        next_event_at = min(*events, arrivals.next_at)
        if math.isinf(next_event_at) and not any(core.has_pending_work for core in cores):
            stalled = [core.stats() for core in cores if core.has_requests]
            if stalled:
                raise Stalled(f"requests are left but nothing is pending: {stalled}")
            return
        clock.wait_until(next_event_at)
        now = clock.now()
        is_due = [at <= now for at in events]
