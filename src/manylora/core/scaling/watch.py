"""The load of a fleet, from the requests that pass through its dispatcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from manylora.core.routing import Dispatcher, Router
from manylora.core.types import Request

__all__ = ["FleetLoad", "LoadWatch", "WatchedDispatcher"]

MOST_MOVED = 1000  # late requests that are remembered after their end, since one that loses its engine ends there first


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """The load of a fleet at one call of the autoscaler."""

    num_arrivals: int  # requests since the start
    num_waiting: int  # requests without a first token
    num_judged: int  # requests since the start whose time to first token is known, or is over the SLO already
    num_kept: int  # of ``num_judged``, the requests within the SLO


class LoadWatch:
    """Counts requests, and judges their times to first token by an SLO of ``ttft_s``. It is told the time."""

    def __init__(self, ttft_s: float) -> None:
        self._ttft_s = ttft_s
        self._arrived_at: dict[str, float] = {}  # requests without a first token, oldest first
        self._late: set[str] = set()  # requests of ``_arrived_at`` that are judged already
        self._ended_late: deque[str] = deque(maxlen=MOST_MOVED)  # judged, and ended where they waited
        self._num_arrivals = self._num_judged = self._num_kept = 0

    def arrived(self, request_id: str, now: float) -> None:
        """Count a new request."""
        self._arrived_at[request_id] = now
        self._num_arrivals += 1

    def moved(self, request_id: str, now: float) -> None:
        """Learn that a request goes on elsewhere, without a first token: it waits again, and is no arrival."""
        self._arrived_at.pop(request_id, None)  # its place is behind those that arrived before
        self._arrived_at[request_id] = now
        if request_id in self._ended_late:  # once late, it is not judged again
            self._late.add(request_id)

    def started(self, request_id: str, now: float) -> None:
        """Learn that a request has its first token; a request that is not waiting is ignored."""
        arrived_at = self._arrived_at.pop(request_id, None)
        if arrived_at is None:
            return
        if request_id in self._late:
            self._late.discard(request_id)
        else:
            self._num_judged += 1
            self._num_kept += now - arrived_at <= self._ttft_s

    def ended(self, request_id: str) -> None:
        """Learn that a request ended. Without a token it is judged no more, unless it moves to another engine."""
        self._arrived_at.pop(request_id, None)
        if request_id in self._late:
            self._late.discard(request_id)
            self._ended_late.append(request_id)

    def load(self, now: float) -> FleetLoad:
        """Return the load; requests that wait for longer than the SLO are late already."""
        for request_id, arrived_at in self._arrived_at.items():
            if now - arrived_at <= self._ttft_s:
                break
            if request_id not in self._late:
                self._late.add(request_id)
                self._num_judged += 1
        return FleetLoad(
            num_arrivals=self._num_arrivals,
            num_waiting=len(self._arrived_at),
            num_judged=self._num_judged,
            num_kept=self._num_kept,
        )


class WatchedDispatcher(Dispatcher):
    """A dispatcher whose load is watched; ``now`` returns the time in seconds."""

    def __init__(
        self,
        router: Router,
        num_replicas: int,
        ranks: Mapping[str, int],
        *,
        watch: LoadWatch,
        now: Callable[[], float],
        caches_prefixes: bool = True,
    ) -> None:
        super().__init__(router, num_replicas, ranks, caches_prefixes=caches_prefixes)
        self._watch = watch
        self._now = now

    def dispatch(self, request: Request, serving: Container[int] | None = None, num_answered: int | None = None) -> int:
        """Return the replica for a request."""
        replica = super().dispatch(request, serving, num_answered)
        if num_answered is None:
            self._watch.arrived(request.request_id, self._now())
        elif not num_answered:
            self._watch.moved(request.request_id, self._now())
        return replica

    def started(self, request_id: str) -> None:
        """Learn that a request has its first token."""
        self._watch.started(request_id, self._now())
        super().started(request_id)

    def ended(self, request_id: str) -> int:
        """Learn that a request ended or was refused; return its replica."""
        self._watch.ended(request_id)
        return super().ended(request_id)
