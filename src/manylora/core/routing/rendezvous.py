"""Rendezvous hashing: an order of the replicas for every adapter.

A new replica takes over its fair share of adapters and moves no others.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["Rendezvous"]

MOST_KEPT = 65_536
"""Orders that are kept: names come from clients, so there is no limit to their number."""


class Rendezvous:
    """The replicas in the order of each adapter, by a hash of both names."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, int], tuple[int, ...]] = {}

    def order(self, adapter: str, num_replicas: int) -> tuple[int, ...]:
        """Return the order of an adapter."""
        order = self._orders.get((adapter, num_replicas))
        if order is None:
            if len(self._orders) >= MOST_KEPT:
                self._orders.clear()
            order = tuple(sorted(range(num_replicas), key=lambda index: _weight(adapter, index)))
            self._orders[adapter, num_replicas] = order
        return order


def _weight(adapter: str, replica: int) -> bytes:
    return blake2b(f"{replica}/{adapter}".encode(), digest_size=8).digest()
