"""A backend: its address and connections, health, reports, and the requests of this router there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import msgspec

from manylora.core.routing import ReplicaView
from manylora.route.backends.health import BackendState, Health
from manylora.route.backends.report import BackendMetrics, Card, ServerKind
from manylora.route.upstream.address import Address
from manylora.route.upstream.connection import Failure
from manylora.route.upstream.pool import Pool

__all__ = ["Backend", "Cancellable"]


class Cancellable(Protocol):
    """An exchange under way."""

    def cancel(self, failure: Failure) -> None:
        """End it."""
        ...


class Backend:
    """One server behind the router. For the event loop's thread alone.

    Args:
        address: Its address.
        pool: Connections to it.
        health: Its health.
        max_in_flight: Most requests at once.
        stale_s: Age from which its metrics no longer count, in seconds.
    """

    def __init__(self, address: Address, pool: Pool, health: Health, *, max_in_flight: int, stale_s: float) -> None:
        self.address = address
        self.url = address.url
        self.pool = pool
        self.health = health
        self.view = ReplicaView()
        self.kind = ServerKind.OTHER
        self.cards: Mapping[str, Card] = {}
        self.raw_cards: Mapping[str, msgspec.Raw] = {}
        self.outdated: set[str] = set()  # adapters that it lacks, or has in another version; see ``Catalog.hide``
        self.metrics = BackendMetrics()
        self.metrics_at: float | None = None
        self.is_leaving = False
        self.num_in_flight = 0
        self.num_reads = 0  # counted by exchanges: signs of life of its process
        self.num_pieces = 0  # of answers that are no errors, and reported tokens: signs of life of its engine
        self.avoid_until = 0.0  # by a 429 or 503 with Retry-After
        self.in_flight_by_adapter: Counter[str] = Counter()
        self.exchanges: set[Cancellable] = set()
        self._max_in_flight = max_in_flight
        self._stale_s = stale_s

    def can_take(self, now: float) -> bool:
        """Whether it is up, not avoided, and below its bound, which grows during a slow start."""
        if not self.can_be_forced() or now < self.avoid_until:
            return False
        share = self.health.share(now)
        return share == 1.0 or self.num_in_flight < max(1, int(share * self._max_in_flight))

    def can_be_forced(self) -> bool:
        """Whether it is up and below its bound: the last resort."""
        return self.health.is_up and self._has_room()

    def can_be_tried(self) -> bool:
        """Whether it is out, and below its bound: it may be better than no answer."""
        return self.health.state is BackendState.DOWN and self._has_room()

    def begin(self, adapter: str) -> None:
        """Count a request."""
        self.num_in_flight += 1
        if adapter:
            self.in_flight_by_adapter[adapter] += 1

    def end(self, adapter: str) -> None:
        """Count a request out."""
        self.num_in_flight -= 1
        if adapter:
            self.in_flight_by_adapter[adapter] -= 1
            if not self.in_flight_by_adapter[adapter]:
                del self.in_flight_by_adapter[adapter]

    def is_resident(self, adapter: str, now: float) -> bool | None:
        """Whether an adapter is on the device; ``None`` where that is not known.

        It is while requests use it. Else the report decides, while it is young; vLLM reports adapters in use alone.
        """
        if self.in_flight_by_adapter[adapter]:
            return True
        if self.metrics_at is None or now - self.metrics_at > self._stale_s:
            return None
        if self.metrics.on_device is not None:
            return adapter in self.metrics.on_device
        return True if adapter in self.metrics.in_use else None

    def _has_room(self) -> bool:
        return not self.is_leaving and self.num_in_flight < self._max_in_flight

    def cancel_all(self, failure: Failure) -> None:
        """End all exchanges under way."""
        for exchange in list(self.exchanges):
            exchange.cancel(failure)
