"""The one loop: serves on the wall clock and simulates on the virtual one.

A turn never blocks except in ``clock.wait_until``: collect what is complete, take arrivals that are due,
launch, hand out what was collected (while the device works already), wait for the next event.

Several engines can share one clock: each is turned when something of its own is due, so what one does never depends on
how often another woke the loop, and one loop simulates a whole service.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

from manylora.clock import Clock
from manylora.engine.core import EngineCore
from manylora.errors import ManyloraError, Stalled
from manylora.types import Output, Request

__all__ = ["EngineLoop"]

Command = Callable[[EngineCore, float], None]


class EngineLoop:
    """Drives one engine core, or several replicas on one clock.

    Args:
        core: The engine; the first of them where there are several.
        clock: Wall or virtual.
        on_outputs: Takes what requests got in a turn of one engine, and the time in seconds; called on the loop's
            thread.
        arrivals: Requests by time of arrival in seconds, in order; how simulations and replays are fed.
        on_rejected: Takes an arrival the core refused; without it the refusal is raised.
        live: Keep waiting for posted commands when nothing is left, until ``stop``.
        others: Further replicas, whose executors must know when their work completes, as simulated ones do. Posted
            commands reach the first engine alone.
        route: Says which replica an arrival goes to, 0 being ``core``, and is told the time.
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
        others: Seq[EngineCore] = (),
        route: Callable[[Request, float], int] = lambda request, now: 0,
    ) -> None:
        self._cores = (core, *others)
        self._clock = clock
        self._on_outputs = on_outputs
        self._on_rejected = on_rejected
        self._live = live
        self._route = route
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
        cores = self._cores
        while not self._is_stopping:
            now = self._clock.now()
            while self._inbox:
                self._inbox.popleft()(cores[0], now)
            due = cores if len(cores) == 1 else [core for core in cores if core.next_event_at() <= now]
            collected = [core.collect(now) for core in due]
            for core in self._take_arrivals(now, due):
                core.launch(now)
            for outputs in collected:
                if outputs:
                    self._on_outputs(outputs, now)
            if self._inbox:
                continue
            next_event_at = min(core.next_event_at() for core in cores)
            if self._next_arrival is not None:
                next_event_at = min(next_event_at, self._next_arrival[0])
            if math.isinf(next_event_at) and not any(core.has_pending_work for core in cores):
                stalled = [core.stats() for core in cores if core.has_requests]
                if stalled:
                    raise Stalled(f"requests are left but nothing is pending: {stalled}")
                if not self._live:
                    return
            if next_event_at > now:
                self._clock.wait_until(next_event_at)

    def _take_arrivals(self, now: float, due: Seq[EngineCore]) -> Seq[EngineCore]:
        """Hand arrivals over that are due; return the engines with something to launch, each once, in their order."""
        reached = set()
        while self._next_arrival is not None and self._next_arrival[0] <= now:
            request = self._next_arrival[1]
            replica = self._route(request, now)
            reached.add(replica)
            try:
                self._cores[replica].add_request(request, now)
            except ManyloraError as error:
                if self._on_rejected is None:
                    raise
                self._on_rejected(request, error, now)
            self._next_arrival = next(self._arrivals, None)
        if len(due) == len(self._cores) or not reached:
            return due
        return [core for index, core in enumerate(self._cores) if index in reached or core in due]
