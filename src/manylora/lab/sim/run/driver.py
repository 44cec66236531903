"""The loop of simulated engines on one virtual clock.

::

    arrivals --dispatch--> core 0   core 1   core 2      all on one clock
                             |        |        |
                             +--- a turn of each engine with an event due or a new request

A turn is as in ``EngineLoop``: collect, add arrivals, launch, deliver. Each engine has one when an event of its own
is due, so its decisions never depend on the events of another. A fleet that scales starts and ends engines between two
turns (``scaling.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from manylora.core.clock import VirtualClock
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import RequestsByTime
from manylora.core.errors import Stalled
from manylora.core.plugins import name_plugins
from manylora.core.types import Output, Request
from manylora.lab.sim.run.scaling import SimulatedStarts

__all__ = ["drive"]


@name_plugins()
def drive(
    cores: Mapping[int, EngineCore],
    clock: VirtualClock,
    arrivals: RequestsByTime,
    *,
    dispatch: Callable[[Request], int],
    on_outputs: Callable[[list[Output], float], None],
    starts: SimulatedStarts | None = None,
) -> None:
    """Run until no request is left.

    Args:
        cores: The engines by number, in its order. Their executors know when work completes.
        clock: Jumps to the next event of any of them.
        arrivals: The requests.
        dispatch: Returns the number of the engine for a request.
        on_outputs: Called with the outputs of one engine's turn, and the time in seconds.
        starts: Starts and ends engines of ``cores`` in its turns; ``None`` for a fixed fleet.

    ``Stalled`` if requests are left, and no step, load or arrival is pending; the error of a plug-in has a note with
    its name and the line.
    """
    due: list[int] = []

    def reach(request: Request) -> EngineCore:
        index = dispatch(request)
        if index not in due:
            due.append(index)
        return cores[index]

    now = clock.now()
    while True:
        collected = [cores[index].collect(now) for index in due]
        arrivals.submit_due(now, reach)
        for index in sorted(due):
            cores[index].launch(now)
        for outputs in collected:
            if outputs:
                on_outputs(outputs, now)
        events = {index: core.next_event_at() for index, core in cores.items()}
        next_event_at = min(*events.values(), arrivals.next_at)
        if math.isinf(next_event_at) and not any(core.has_pending_work for core in cores.values()):
            stalled = [core.stats() for core in cores.values() if core.has_requests]
            if stalled:
                raise Stalled(f"requests are left but nothing is pending: {stalled}")
            return
        if starts is not None:
            next_event_at = min(next_event_at, starts.next_at)
        clock.wait_until(next_event_at)
        now = clock.now()
        if starts is not None and starts.next_at <= now:
            starts.turn(now)
        due = [index for index, at in events.items() if at <= now and index in cores]
