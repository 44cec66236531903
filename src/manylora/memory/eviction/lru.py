"""Least recently used first; also what ``none`` falls back on for adapters that were warmed and never used."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from manylora.memory.eviction.policy import IdleItem
from manylora.types import AdapterKey

__all__ = ["LruScore"]


class LruScore:
    """An adapter is worth as much as its last use is recent."""

    def used(self, key: AdapterKey, now: float) -> None:
        """Nothing to learn: an item knows since when it is idle."""

    def forget(self, key: AdapterKey) -> None:
        """Nothing was learnt."""

    def evicted(self, item: IdleItem) -> None:
        """Nothing to learn."""

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """All in one line, by last use."""
        return None, item.idle_since

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """No adapter overtakes another."""
        return ()

    def worth(self, item: IdleItem, now: float) -> float:
        """Return the time of its last use."""
        return item.idle_since
