"""How policies for adapters live beside prefix blocks: each kind nominates one, and the one idle for longer goes.

The published policies rank adapters only; their systems keep no prefix blocks. Here blocks stand in order of last
use, and a policy for adapters needs a rule for which kind yields. Comparing scores across kinds would be comparing
unlike quantities, and a fixed order would starve one kind of cache. So each kind nominates its own worst, and of the
two the one idle for longer goes: with ``lru`` for the adapters this is plain LRU over everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from manylora.memory.eviction.policy import Depth, IdleItem, ItemKey
from manylora.memory.eviction.ranking import Ranking
from manylora.types import AdapterKey

__all__ = ["AdapterScore", "ByAge"]


class AdapterScore(Protocol):
    """What one published policy thinks of adapters. ``now`` is in seconds."""

    def used(self, key: AdapterKey, now: float) -> None:
        """Learn that a request needs it."""
        ...

    def forget(self, key: AdapterKey) -> None:
        """Forget an adapter that was unloaded."""
        ...

    def evicted(self, item: IdleItem) -> None:
        """Learn that it was dropped for room."""
        ...

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """Return its group and its order in the group, lowest first (see ``ranking.py``)."""
        ...

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """Return the adapters whose place has changed since the last call, for no other reason than time."""
        ...

    def worth(self, item: IdleItem, now: float) -> float:
        """Return its score; the lowest goes first."""
        ...


class ByAge:
    """An eviction policy from a score for adapters.

    Args:
        score: Ranks adapters.
        keeps_idle_adapters: Whether adapters stay once no sequence uses or waits for them.
    """

    def __init__(self, score: AdapterScore, *, keeps_idle_adapters: bool = True) -> None:
        self._score = score
        self._keeps = keeps_idle_adapters
        self._blocks = Ranking(_idle_since)
        self._adapters = {depth: Ranking(score.worth) for depth in Depth}

    @property
    def keeps_idle_adapters(self) -> bool:
        """Whether an adapter stays on the device once no sequence uses or waits for it."""
        return self._keeps

    def used(self, key: ItemKey, now: float) -> None:
        """Tell the score; blocks need no more than their place in line."""
        if isinstance(key, str):
            self._score.used(key, now)
            self._rescore()

    def forget(self, key: AdapterKey, now: float) -> None:
        """Forget it."""
        self._score.forget(key)

    def add(self, item: IdleItem, depth: Depth) -> None:
        """Put an item into its line."""
        if isinstance(item.key, str):
            self._adapters[depth].add(item, *self._score.place(item))
            self._rescore()
        else:
            assert depth is Depth.IDLE, "only adapters are wanted"
            self._blocks.add(item, None, item.idle_since)

    def remove(self, key: ItemKey) -> None:
        """Take an item out of its line."""
        self._line_of(key).remove(key)

    def evict(self, key: ItemKey, now: float) -> None:
        """Take out a dropped item."""
        item = self._line_of(key).remove(key)
        if isinstance(key, str):
            self._score.evicted(item)

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the nominee that is idle for longer."""
        for key in self._score.moved(now):
            line = self._line_of(key)
            if key in line:
                item = line.remove(key)
                line.add(item, *self._score.place(item))
        adapter = self._adapters[depth].least(now, spare)
        block = self._blocks.least(now) if depth is Depth.IDLE else None
        if adapter is None or block is None:
            return adapter or block
        return adapter if adapter.idle_since < block.idle_since else block

    def price(self, item: IdleItem, now: float) -> float:
        """Scores are not seconds: nothing can be compared with them."""
        return float("inf")

    def _rescore(self) -> None:
        for line in self._adapters.values():
            line.rescore()

    def _line_of(self, key: ItemKey) -> Ranking:
        if not isinstance(key, str):
            return self._blocks
        return self._adapters[Depth.IDLE if key in self._adapters[Depth.IDLE] else Depth.WANTED]


def _idle_since(item: IdleItem, now: float) -> float:
    return item.idle_since
