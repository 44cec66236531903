"""GreedyDual-Size-Frequency: worth ages by a clock that evictions advance, not by time.

::

    worth = clock at its last use + uses while on the device * seconds to reload it / pages

Evicting an adapter sets the clock to its worth, so an adapter that is used later starts above it.

Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy" (1998), in the
form FaasCache (ASPLOS '21) uses for functions: frequency starts afresh when an item has been evicted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from manylora.core.memory.eviction.costs import ReloadCosts
from manylora.core.memory.eviction.policy import IdleItem
from manylora.core.types import AdapterKey

__all__ = ["GdsfScore"]


class GdsfScore:
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
        """Drop its count."""
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

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """None: time alone changes no order."""
        return ()

    def worth(self, item: IdleItem, now: float) -> float:
        """Return its worth."""
        assert isinstance(item.key, str)
        return self._worth[item.key]
