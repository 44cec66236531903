"""Requests by time of arrival: how simulations, replays and benchmarks feed engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from manylora.engine.core import EngineCore
from manylora.errors import ManyloraError
from manylora.types import Request

__all__ = ["Arrivals"]


class Arrivals:
    """Hands requests over when they are due.

    Args:
        requests: With their times of arrival in seconds, in order; drawn one by one.
        on_rejected: Takes a request that the engine refused, and the time; without it the refusal is raised.
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
        """When the next one is due, in seconds; infinite when none is left."""
        return math.inf if self._next is None else self._next[0]

    def hand_over(self, now: float, engine_for: Callable[[Request], EngineCore]) -> None:
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
