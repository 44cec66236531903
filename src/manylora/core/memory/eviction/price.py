"""One order over idle adapters and idle prefix blocks, by the time that keeping each saves per page.

::

    price = seconds to reload it * uses expected per second / pages

Adapters and prefixes use the same memory, and a request waits for copies of weights as for recomputed prompts. So both
have a price in the same unit, seconds saved per second and page, and the cheapest item is dropped. Reload times are
measured (``costs.py``) and rates of reuse are learnt (``reuse.py``), for adapters and blocks separately. No weight is
set by hand.
"""

from __future__ import annotations

import math

from manylora.core.memory.eviction.costs import ReloadCosts
from manylora.core.memory.eviction.policy import Depth, IdleItem, ItemKey
from manylora.core.memory.eviction.ranking import Ranking
from manylora.core.memory.eviction.reuse import ReuseModel
from manylora.core.types import AdapterKey

__all__ = ["PriceEviction"]

SIZES_PER_OCTAVE = 4


class PriceEviction:
    """Drops the cheapest item of either kind first."""

    keeps_idle_adapters = True

    def __init__(self, costs: ReloadCosts) -> None:
        self._costs = costs
        self._adapter_reuse: ReuseModel[AdapterKey] = ReuseModel()
        self._block_reuse: ReuseModel[int] = ReuseModel()
        self._idle = Ranking(self.price)
        self._wanted = Ranking(self.price)

    def used(self, key: ItemKey, now: float) -> None:
        """Record the gap between two uses."""
        if isinstance(key, str):
            self._adapter_reuse.used(key, now)
        else:
            self._block_reuse.used(key, now)
        self._idle.rescore()  # the new estimate may change every price
        self._wanted.rescore()

    def forget(self, key: AdapterKey, now: float) -> None:
        """Drop an adapter's history."""
        self._adapter_reuse.forget(key, now)

    def add(self, item: IdleItem, depth: Depth) -> None:
        """Add an item to the group of items that differ only in age (and by less than a fifth in size)."""
        if isinstance(item.key, str):
            # An adapter that requests wait for is no longer between two uses.
            learn = self._adapter_reuse.idle if depth is Depth.IDLE else self._adapter_reuse.group
            size = math.floor(SIZES_PER_OCTAVE * math.log2(item.num_pages))
            group = (learn(item.key, item.idle_since), size, item.read_bytes > 0)
        else:
            group = (self._block_reuse.idle(item.key, item.idle_since), -1, False)
        self._ranking(depth).add(item, group, item.idle_since)

    def remove(self, key: ItemKey) -> None:
        """Remove an item."""
        (self._idle if key in self._idle else self._wanted).remove(key)

    def evict(self, key: ItemKey, now: float) -> None:
        """Remove a dropped item. An adapter's gap continues; a page number will be reused for another block."""
        self.remove(key)
        if not isinstance(key, str):
            self._block_reuse.forget(key, now)

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the cheapest item."""
        return self._ranking(depth).least(now, spare)

    def price(self, item: IdleItem, now: float) -> float:
        """Return the seconds saved per second and page by keeping an item."""
        if isinstance(item.key, str):
            rate = self._adapter_reuse.rate(item.key, now)
        else:
            rate = self._block_reuse.rate(item.key, now)
        return self._costs.reload_s(item) * rate / item.num_pages

    def _ranking(self, depth: Depth) -> Ranking:
        return self._idle if depth is Depth.IDLE else self._wanted
