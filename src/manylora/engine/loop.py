"""The one loop: serves on the wall clock and simulates on the virtual one.

A turn never blocks except in ``clock.wait_until``: collect what is complete, take arrivals that are due,
launch, hand out what was collected (while the device works already), wait for the next event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from manylora.clock import Clock
from manylora.engine.core import EngineCore
from manylora.errors import ManyloraError, Stalled
from manylora.types import Output, Request

__all__ = ["EngineLoop"]

Command = Callable[[EngineCore, float], None]


class EngineLoop:
    """Drives one engine core.

    Args:
        core: The engine.
        clock: Wall or virtual.
        on_outputs: Takes what requests got in a turn, and the time in seconds; called on the loop's thread.
        arrivals: Requests by time of arrival in seconds, in order; how simulations and replays are fed.
        on_rejected: Takes an arrival the core refused; without it the refusal is raised.
        live: Keep waiting for posted commands when nothing is left, until ``stop``.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: Clock,
        *,
        on_outputs: Callable[[list[Output], float], None],
        arrivals: Iterable[tuple[float, Request]] = (),
        on_rejected: Callable[[Request, ManyloraError, float], None] | None = None,
        live: bool = False,
    ) -> None:
        self._core = core
        self._clock = clock
        self._on_outputs = on_outputs
        self._on_rejected = on_rejected
        self._live = live
        self._arrivals: Iterator[tuple[float, Request]] = iter(arrivals)
        self._next_arrival = next(self._arrivals, None)
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
        while not self._is_stopping:
            now = self._clock.now()
            while self._inbox:
                self._inbox.popleft()(self._core, now)
            outputs = self._core.collect(now)
            self._take_arrivals(now)
            self._core.launch(now)
            if outputs:
                self._on_outputs(outputs, now)
            if self._inbox:
                continue
            next_event_at = min(self._core.next_event_at(), self._next_arrival[0] if self._next_arrival else math.inf)
            if math.isinf(next_event_at) and not self._core.has_pending_work:
                if self._core.has_requests:
                    raise Stalled(f"requests are left but nothing is pending: {self._core.stats()}")
                if not self._live:
                    return
            if next_event_at > now:
                self._clock.wait_until(next_event_at)

    def _take_arrivals(self, now: float) -> None:
        while self._next_arrival is not None and self._next_arrival[0] <= now:
            request = self._next_arrival[1]
            try:
                self._core.add_request(request, now)
            except ManyloraError as error:
                if self._on_rejected is None:
                    raise
                self._on_rejected(request, error, now)
            self._next_arrival = next(self._arrivals, None)
