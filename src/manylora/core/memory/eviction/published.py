"""Published eviction policies for adapters, combined with prefix blocks.

They rank adapters only; their systems keep no prefix blocks. Here blocks are in order of last use. Scores of the two
kinds are not comparable, and a fixed order would starve one kind. So each kind nominates its lowest item, and of the
two the item that is idle for longer is dropped.

*GreedyDual-Size-Frequency* ages by a clock that evictions advance, not by time. Evicting an adapter sets the clock to
its worth, so an adapter that is used later starts above it::

    worth = clock at its last use + uses while on the device * seconds to reload it / pages

Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy" (1998), in the
form FaasCache (ASPLOS '21) uses for functions: frequency starts afresh when an item has been evicted.

*Chameleon's score* is a weighted sum of frequency, recency and size, lowest first::

    score = F * uses / most uses of any adapter  +  R * (1 - idle / window)  +  S * pages / most pages of any adapter
                (both within the window)                (0 beyond the window)       (seen so far)

The paper says "within a specific time frame" and gives neither its length nor the normalisation. Here the window is
five minutes (the paper's period for other refreshes), and each term lies in [0, 1]: frequency relative to the most used
adapter in the window, recency to the window, size to the largest adapter seen. These do not depend on the set of idle
adapters, so dropping one adapter changes no other's score. Large adapters score high as in the paper (a miss costs
more): the score is per adapter, not per byte.

Source: Chameleon, section 4.2, "Cost-Aware Eviction Policy"; ``fair`` is its ablation with equal weights (fig. 17).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Protocol

from manylora.core.memory.eviction.policy import Depth, EvictionPolicy, IdleItem, ItemKey, ReloadCosts
from manylora.core.memory.eviction.ranking import Ranking
from manylora.core.types import AdapterKey

__all__ = ["AdapterScore", "ByAge", "GdsfScore", "WeightedScore"]

WINDOW_S = 300.0


class AdapterScore(Protocol):
    """Ranks adapters by a published policy. ``now`` is in seconds."""

    def used(self, key: AdapterKey, now: float) -> None:
        """Record that a request needs it."""

    def forget(self, key: AdapterKey) -> None:
        """Forget an adapter that was unloaded."""

    def evicted(self, item: IdleItem) -> None:
        """Record that the adapter was dropped for a claim."""
        return

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """Return the group of the adapter and its order in the group, lowest first (see ``ranking.py``)."""

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """Return the adapters whose place has changed since the last call, other than by the calls above."""
        return ()

    def worth(self, item: IdleItem, now: float) -> float:
        """Return the score of the adapter; the lowest goes first."""


class ByAge(EvictionPolicy):
    """An eviction policy from a score for adapters."""

    def __init__(self, score: AdapterScore) -> None:
        self._score = score
        self._blocks = Ranking(lambda item, now: item.idle_since)
        self._adapters = {depth: Ranking(score.worth) for depth in Depth}

    def used(self, key: ItemKey, now: float) -> None:
        """Update the score; blocks need only their place in the ranking."""
        if isinstance(key, str):
            self._score.used(key, now)
            self._rescore()

    def forget(self, key: AdapterKey, now: float) -> None:
        """Forget the item."""
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

    def _rescore(self) -> None:
        for ranking in self._adapters.values():
            ranking.rescore()

    def _ranking_of(self, key: ItemKey) -> Ranking:
        if not isinstance(key, str):
            return self._blocks
        return self._adapters[Depth.IDLE if key in self._adapters[Depth.IDLE] else Depth.WANTED]


class GdsfScore(AdapterScore):
    """The clock plus frequency times reload cost per page."""

    def __init__(self, costs: ReloadCosts) -> None:
        self._costs = costs
        self._clock = 0.0
        self._num_uses: dict[AdapterKey, int] = {}
        self._worth: dict[AdapterKey, float] = {}

    def used(self, key: AdapterKey, now: float) -> None:
        """Count a use."""
        self._num_uses[key] = self._num_uses.get(key, 0) + 1

    def forget(self, key: AdapterKey) -> None:
        """Drop the count of the adapter's uses."""
        self._num_uses.pop(key, None)
        self._worth.pop(key, None)

    def evicted(self, item: IdleItem) -> None:
        """Advance the clock, and reset the adapter's count."""
        assert isinstance(item.key, str)
        self._clock = max(self._clock, self._worth.pop(item.key))
        self._num_uses.pop(item.key, None)

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """All in one group, by a worth that is constant until the next use."""
        assert isinstance(item.key, str)
        gain = self._num_uses.get(item.key, 0) * self._costs.reload_s(item) / item.num_pages
        self._worth[item.key] = self._clock + gain
        return None, self._worth[item.key]

    def worth(self, item: IdleItem, now: float) -> float:
        """Return the worth of the adapter since its last use: the clock plus uses times reload cost per page."""
        assert isinstance(item.key, str)
        return self._worth[item.key]


class WeightedScore(AdapterScore):
    """Frequency, recency and size, with the weights F, R and S; uses of an adapter that is reloaded still count."""

    def __init__(self, frequency: float, recency: float, size: float, *, window_s: float = WINDOW_S) -> None:
        self._weights = (frequency, recency, size)
        self._window_s = window_s
        self._recent: deque[tuple[float, AdapterKey]] = deque()  # uses in the window, oldest first
        self._num_uses: dict[AdapterKey, int] = {}
        self._num_with: dict[int, int] = {}  # number of uses -> adapters that have as many
        self._most_uses = 0
        self._most_pages = 1
        self._moved: dict[AdapterKey, None] = {}

    def used(self, key: AdapterKey, now: float) -> None:
        """Count a use."""
        self._recent.append((now, key))
        self._change(key, 1)
        self._expire(now)  # in a pool that is never full nobody asks what has moved

    def forget(self, key: AdapterKey) -> None:
        """Remove the uses of the adapter."""
        if key in self._num_uses:
            self._recent = deque(use for use in self._recent if use[1] != key)
            self._change(key, -self._num_uses[key])
        self._moved.pop(key, None)

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """Group adapters that differ only in age."""
        assert isinstance(item.key, str)
        self._most_pages = max(self._most_pages, item.num_pages)
        return (self._num_uses.get(item.key, 0), item.num_pages), item.idle_since

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """Return the adapters whose number of uses in the window has changed."""
        self._expire(now)
        moved, self._moved = self._moved, {}
        return moved

    def worth(self, item: IdleItem, now: float) -> float:
        """Return F * frequency + R * recency + S * size, each in [0, 1]."""
        assert isinstance(item.key, str)
        frequency, recency, size = self._weights
        uses = self._num_uses.get(item.key, 0) / max(1, self._most_uses)
        freshness = max(0.0, 1.0 - (now - item.idle_since) / self._window_s)
        return frequency * uses + recency * freshness + size * item.num_pages / self._most_pages

    def _expire(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self._window_s:
            self._change(self._recent.popleft()[1], -1)

    def _change(self, key: AdapterKey, by: int) -> None:
        """Change a count and update the largest, which changes by one except when an adapter is forgotten."""
        old = self._num_uses.pop(key, 0)
        new = old + by
        if old:
            self._num_with[old] -= 1
        if new:
            self._num_uses[key] = new
            self._num_with[new] = self._num_with.get(new, 0) + 1
        self._most_uses = max(self._most_uses, new)
        while self._most_uses and not self._num_with.get(self._most_uses):
            self._num_with.pop(self._most_uses, None)
            self._most_uses -= 1
        self._moved[key] = None
