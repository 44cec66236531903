"""Find the item of least worth among thousands of idle items without scoring each; policies by one number per item.

Worth changes with time, so a heap of scores would become invalid. But the order of items that differ only in their idle
time never changes. So items are kept in *groups*, each a heap that stays valid, and only the head of each group is
scored:

::

    group (used 1x, 8 pages)    [idle 9 s] idle 4 s  idle 1 s
    group (used 4x, 8 pages)    [idle 70 s] idle 2 s              <- one score per group: min of the heads
    group (used 4x, 32 pages)   [idle 31 s]

Scores of heads are valid for one time, so a claim that drops many items scores each group once, and then only the
groups of dropped items. A head that differs from the previous one only in its key, as blocks of one prompt do, keeps
its score.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush

from manylora.core.memory.eviction.policy import Depth, EvictionPolicy, IdleItem, ItemKey
from manylora.core.types import AdapterKey

__all__ = ["KeyedEviction", "Ranking"]

_Entry = tuple[float, int, ItemKey]  # order, serial, key


class Ranking:
    """Idle items in groups; within a group the item of lowest ``order`` is worth least at any time.

    ``worth`` is the score of an item at a time; the lowest goes first. Items of one group and ``order`` that are equal
    except for their keys must have equal scores.
    """

    def __init__(self, worth: Callable[[IdleItem, float], float]) -> None:
        self._worth = worth
        self._heaps: dict[Hashable, list[_Entry]] = {}
        self._num_live: dict[Hashable, int] = {}
        self._items: dict[ItemKey, tuple[IdleItem, Hashable, float, int]] = {}  # with group, order, serial
        self._serial = 0
        self._heads: dict[Hashable, tuple[float, int, ItemKey]] = {}  # worth at _scored_at, serial, key
        self._scored_at: float | None = None
        self._unscored: dict[Hashable, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: ItemKey) -> bool:
        return key in self._items

    def add(self, item: IdleItem, group: Hashable, order: float) -> None:
        """Add an item."""
        assert item.key not in self._items
        self._serial += 1
        self._items[item.key] = (item, group, order, self._serial)
        heap = self._heaps.setdefault(group, [])
        heappush(heap, (order, self._serial, item.key))
        self._num_live[group] = self._num_live.get(group, 0) + 1
        if heap[0][1] == self._serial:
            self._unscored[group] = None

    def remove(self, key: ItemKey) -> IdleItem:
        """Remove an item; its entry in the heap is skipped later."""
        item, group, order, serial = self._items.pop(key)
        self._num_live[group] -= 1
        heap = self._heaps[group]
        if not self._num_live[group]:
            del self._heaps[group], self._num_live[group]
            self._heads.pop(group, None)
            self._unscored.pop(group, None)
        elif heap[0][1] == serial:
            heappop(heap)
            next_order, next_serial, next_key = self._head_of(heap)
            next_item = self._items[next_key][0]
            if group not in self._unscored and next_order == order and next_item[1:] == item[1:]:
                self._heads[group] = (self._heads[group][0], next_serial, next_key)
            else:
                self._unscored[group] = None
        elif len(heap) > 2 * self._num_live[group] + 16:
            heap[:] = [entry for entry in heap if self._is_live(entry)]
            heapify(heap)
        return item

    def rescore(self) -> None:
        """Score every group again, after worth has changed for another reason than time."""
        self._scored_at = None

    def least(self, now: float, spare: ItemKey | None = None) -> IdleItem | None:
        """Return the item of least worth, other than ``spare``; of equal items the first added."""
        if now != self._scored_at:
            self._scored_at = now
            self._unscored = dict.fromkeys(self._heaps)
        if spare is not None and spare in self._items:
            # Rare: the adapter for which a claim is made.
            item, group, order, _ = self._items[spare]
            self.remove(spare)
            found = self.least(now)
            self.add(item, group, order)
            return found
        for group in self._unscored:
            _, serial, key = self._head_of(self._heaps[group])
            self._heads[group] = (self._worth(self._items[key][0], now), serial, key)
        self._unscored.clear()
        return self._items[min(self._heads.values())[2]][0] if self._heads else None

    def _head_of(self, heap: list[_Entry]) -> _Entry:
        """Return the first live entry of a group, which has one, and remove those before it."""
        while not self._is_live(heap[0]):
            heappop(heap)
        return heap[0]

    def _is_live(self, entry: _Entry) -> bool:
        known = self._items.get(entry[2])
        return known is not None and known[3] == entry[1]


class KeyedEviction(EvictionPolicy):
    """An eviction policy given by one number per item: the item of the least number is dropped first.

    An item is an adapter (its key is text) or a prefix block (its key is the number of its page)::

        def large_first(costs: ReloadCosts) -> EvictionPolicy:
            return KeyedEviction(lambda item: -item.num_pages)

    Args:
        worth: The number of an item that becomes idle, fixed while it is idle; of equals, the first to be idle goes.
        keeps_idle_adapters: Whether adapters stay when no sequence uses or waits for them.
    """

    def __init__(self, worth: Callable[[IdleItem], float], *, keeps_idle_adapters: bool = True) -> None:
        self.keeps_idle_adapters = keeps_idle_adapters
        self._worth = worth
        self._idle, self._wanted = Ranking(_alike), Ranking(_alike)

    def add(self, item: IdleItem, depth: Depth) -> None:
        """Add an item by its number."""
        (self._idle if depth is Depth.IDLE else self._wanted).add(item, None, self._worth(item))

    def remove(self, key: ItemKey) -> None:
        """Remove an item."""
        (self._idle if key in self._idle else self._wanted).remove(key)

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the item of the least number."""
        return (self._idle if depth is Depth.IDLE else self._wanted).least(now, spare)


def _alike(item: IdleItem, now: float) -> float:
    return 0.0  # there is one group, whose order decides
