"""The loop of one engine, on the wall clock or on a virtual one.

A turn never blocks except in ``clock.wait_until``: collect completed work, take arrivals that are due, launch, hand out
the collected outputs (while the device works already), wait for the next event.

Several simulated engines on one clock have a driver of their own (``sim/run/driver.py``), made of the same turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from manylora.clock import Clock
from manylora.engine.arrivals import Arrivals
from manylora.engine.core import EngineCore
from manylora.errors import Stalled
from manylora.types import Output, Request

__all__ = ["EngineLoop"]

Command = Callable[[EngineCore, float], None]


class EngineLoop:
    """Drives an engine core.

    Args:
        core: The engine.
        clock: Wall or virtual.
        on_outputs: Takes the outputs of a turn, and the time in seconds; called on the loop's thread.
        arrivals: Requests by time of arrival in seconds, in order; one that is refused raises.
        live: Keep waiting for posted commands when nothing is left, until ``stop``.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: Clock,
        *,
        on_outputs: Callable[[list[Output], float], None],
        arrivals: Iterable[tuple[float, Request]] = (),
        live: bool = False,
    ) -> None:
        self._core = core
        self._clock = clock
        self._on_outputs = on_outputs
        self._arrivals = Arrivals(arrivals)
        self._live = live
        self._inbox: deque[Command] = deque()  # append and popleft are atomic
        self._is_stopping = False

    def post(self, command: Command) -> None:
        """Run ``command(core, now)`` on the loop's thread, soon; safe from any thread.

        It must deal with its own errors: one that escapes ends the loop.
        """
        self._inbox.append(command)
        self._clock.wake()

    def stop(self) -> None:
        """Let ``run`` return at the end of its turn; safe from any thread."""
        self._is_stopping = True
        self._clock.wake()

    def run(self) -> None:
        """Run until stopped, or (unless live) until no request is left.

        Raises:
            Stalled: Requests are left and nothing is pending that could move them.
            Exception: The device failed.
        """
        core = self._core
        while not self._is_stopping:
            now = self._clock.now()
            while self._inbox:
                self._inbox.popleft()(core, now)
            outputs = core.collect(now)
            self._arrivals.hand_over(now, lambda request: core)
            core.launch(now)
            if outputs:
                self._on_outputs(outputs, now)
            if self._inbox:
                continue
            next_event_at = min(core.next_event_at(), self._arrivals.next_at)
            if math.isinf(next_event_at) and not core.has_pending_work:
                if core.has_requests:
                    raise Stalled(f"requests are left but nothing is pending: {core.stats()}")
                if not self._live:
                    return
            if next_event_at > now:
                self._clock.wait_until(next_event_at)
