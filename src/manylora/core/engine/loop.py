"""The loop of one engine, on the wall clock or on a virtual one.

A turn never blocks except in ``clock.wait_until``: collect completed work, add arrivals that are due, launch, deliver
the collected outputs (while the device works already), wait for the next event.

``lab/sim/run/driver.py`` runs the same turn for several simulated engines on one clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field

from manylora.core.clock import Clock
from manylora.core.engine.core import EngineCore
from manylora.core.errors import ManyloraError, Stalled
from manylora.core.plugins import name_plugins
from manylora.core.types import Output, Request

__all__ = ["EngineLoop", "RequestsByTime"]

Command = Callable[[EngineCore, float], None]


class RequestsByTime:
    """Requests by time of arrival in seconds, for simulations, replays and benchmarks; drawn one by one, in order.

    ``on_rejected`` is called with a request that the engine refused, and the time; without it the error is raised.
    """

    def __init__(
        self,
        requests: Iterable[tuple[float, Request]] = (),
        on_rejected: Callable[[Request, ManyloraError, float], None] | None = None,
    ) -> None:
        self._requests: Iterator[tuple[float, Request]] = iter(requests)
        self._next = next(self._requests, None)
        self._on_rejected = on_rejected

    @property
    def next_at(self) -> float:
        """The next time of arrival, in seconds; infinite when no request is left."""
        return math.inf if self._next is None else self._next[0]

    def submit_due(self, now: float, engine_for: Callable[[Request], EngineCore]) -> None:
        """Add the requests that are due, each to the engine that is chosen for it."""
        while self._next is not None and self._next[0] <= now:
            request = self._next[1]
            try:
                engine_for(request).add_request(request, now)
            except ManyloraError as error:
                if self._on_rejected is None:
                    raise
                self._on_rejected(request, error, now)
            self._next = next(self._requests, None)


@dataclass(eq=False)
class EngineLoop:
    """Drives an engine core."""

    _core: EngineCore
    _clock: Clock
    _: KW_ONLY
    # Called on the loop's thread with the outputs of a turn, and the time in seconds.
    on_outputs: Callable[[list[Output], float], None]
    # Requests by time of arrival in seconds, in order; one that is refused raises.
    arrivals: InitVar[Iterable[tuple[float, Request]]] = ()
    live: bool = False  # wait for posted commands when no request is left, until ``stop``
    _inbox: deque[Command] = field(default_factory=deque)  # append and popleft are atomic
    _is_stopping: bool = False

    def __post_init__(self, arrivals: Iterable[tuple[float, Request]]) -> None:
        self._arrivals = RequestsByTime(arrivals)

    def post(self, command: Command) -> None:
        """Run ``command(core, now)`` soon on the loop's thread; safe from any thread. Its errors end the loop."""
        self._inbox.append(command)
        self._clock.wake()

    def stop(self) -> None:
        """Let ``run`` return at the end of its turn; safe from any thread."""
        self._is_stopping = True
        self._clock.wake()

    @name_plugins()
    def run(self) -> None:
        """Run until stopped, or (unless live) until no request is left.

        ``Stalled`` if requests are left, and no step, load or arrival is pending; ``Exception`` if the device, or a
        plug-in, failed; of a plug-in, a note has the name and the line.
        """
        core = self._core
        while not self._is_stopping:
            now = self._clock.now()
            while self._inbox:
                self._inbox.popleft()(core, now)
            outputs = core.collect(now)
            self._arrivals.submit_due(now, lambda request: core)
            core.launch(now)
            if outputs:
                self.on_outputs(outputs, now)
            if self._inbox:
                continue
            next_event_at = min(core.next_event_at(), self._arrivals.next_at)
            if math.isinf(next_event_at) and not core.has_pending_work:
                if core.has_requests:
                    raise Stalled(f"requests are left but nothing is pending: {core.stats()}")
                if not self.live:
                    return
            if next_event_at > now:
                self._clock.wait_until(next_event_at)
