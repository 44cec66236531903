"""Eviction policies for adapters, combined with prefix blocks; and LRU.

The published policies rank adapters only; their systems keep no prefix blocks. Here blocks are in order of last use.
Scores of the two kinds are not comparable, and a fixed order would starve one kind. So each kind nominates its lowest
item, and of the two the one idle for longer is dropped. With LRU for the adapters this is plain LRU over all items.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from manylora.core.memory.eviction.policy import Depth, IdleItem, ItemKey
from manylora.core.memory.eviction.ranking import Ranking
from manylora.core.types import AdapterKey

__all__ = ["AdapterScore", "ByAge", "LruScore"]


class AdapterScore(Protocol):
    """Ranks adapters by a published policy. ``now`` is in seconds."""

    def used(self, key: AdapterKey, now: float) -> None:
        """Record that a request needs it."""
        ...

    def forget(self, key: AdapterKey) -> None:
        """Forget an adapter that was unloaded."""
        ...

    def evicted(self, item: IdleItem) -> None:
        """Record that it was dropped for a claim."""
        ...

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """Return its group and its order in the group, lowest first (see ``ranking.py``)."""
        ...

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """Return the adapters whose place has changed since the last call, other than by the calls above."""
        ...

    def worth(self, item: IdleItem, now: float) -> float:
        """Return its score; the lowest goes first."""
        ...


class ByAge:
    """An eviction policy from a score for adapters.

    ``keeps_idle_adapters``: whether adapters stay when no sequence uses or waits for them.
    """

    def __init__(self, score: AdapterScore, *, keeps_idle_adapters: bool = True) -> None:
        self._score = score
        self._keeps = keeps_idle_adapters
        self._blocks = Ranking(_idle_since)
        self._adapters = {depth: Ranking(score.worth) for depth in Depth}

    @property
    def keeps_idle_adapters(self) -> bool:
        """Whether an adapter stays on the device when no sequence uses or waits for it."""
        return self._keeps

    def used(self, key: ItemKey, now: float) -> None:
        """Update the score; blocks need only their place in the ranking."""
        if isinstance(key, str):
            self._score.used(key, now)
            self._rescore()

    def forget(self, key: AdapterKey, now: float) -> None:
        """Forget it."""
        self._score.forget(key)

    def add(self, item: IdleItem, depth: Depth) -> None:
        """Add an item to the ranking of its kind."""
        if isinstance(item.key, str):
            self._adapters[depth].add(item, *self._score.place(item))
            self._rescore()
        else:
            assert depth is Depth.IDLE, "only adapters are wanted"
            self._blocks.add(item, None, item.idle_since)

    def remove(self, key: ItemKey) -> None:
        """Remove an item."""
        self._ranking_of(key).remove(key)

    def evict(self, key: ItemKey, now: float) -> None:
        """Remove a dropped item."""
        item = self._ranking_of(key).remove(key)
        if isinstance(key, str):
            self._score.evicted(item)

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the nominee that is idle for longer."""
        for key in self._score.moved(now):
            ranking = self._ranking_of(key)
            if key in ranking:
                item = ranking.remove(key)
                ranking.add(item, *self._score.place(item))
        adapter = self._adapters[depth].least(now, spare)
        block = self._blocks.least(now) if depth is Depth.IDLE else None
        if adapter is None or block is None:
            return adapter or block
        return adapter if adapter.idle_since < block.idle_since else block

    def price(self, item: IdleItem, now: float) -> float:
        """Return infinity: scores are not seconds."""
        return float("inf")

    def _rescore(self) -> None:
        for ranking in self._adapters.values():
            ranking.rescore()

    def _ranking_of(self, key: ItemKey) -> Ranking:
        if not isinstance(key, str):
            return self._blocks
        return self._adapters[Depth.IDLE if key in self._adapters[Depth.IDLE] else Depth.WANTED]


class LruScore:
    """Least recently used first; ``none`` uses it for adapters that were warmed and never used."""

    def used(self, key: AdapterKey, now: float) -> None:
        """Do nothing: an item has its time of last use."""

    def forget(self, key: AdapterKey) -> None:
        """Do nothing."""

    def evicted(self, item: IdleItem) -> None:
        """Do nothing."""

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """All in one group, by last use."""
        return None, item.idle_since

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """None: time alone changes no order."""
        return ()

    def worth(self, item: IdleItem, now: float) -> float:
        """Return the time of last use."""
        return item.idle_since


def _idle_since(item: IdleItem, now: float) -> float:
    return item.idle_since
