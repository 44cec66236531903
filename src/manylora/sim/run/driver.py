"""The loop of simulated engines on one virtual clock.

::

    arrivals --dispatch--> core 0   core 1   core 2      all on one clock
                             |        |        |
                             +--- a turn of each engine with an event due or a new request

The turn is that of ``EngineLoop``: collect, add arrivals, launch, deliver. Each engine has one when an event of its own
is due, so its decisions never depend on the events of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from manylora.clock import VirtualClock
from manylora.engine.core import EngineCore
from manylora.engine.loop import Arrivals
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
        dispatch: Returns the index of the engine for a request.
        on_outputs: Called with the outputs of one engine's turn, and the time in seconds.

    Raises:
        Stalled: Requests are left, and no step, load or arrival is pending.
    """
    is_due = [False] * len(cores)

    def reach(request: Request) -> EngineCore:
        index = dispatch(request)
        is_due[index] = True
        return cores[index]

    now = clock.now()
    while True:
        collected = [core.collect(now) for core, due in zip(cores, is_due, strict=True) if due]
        arrivals.submit_due(now, reach)
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
