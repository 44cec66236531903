"""One order over idle adapters and idle prefix blocks: what keeping each saves, per page.

::

    price = seconds to bring it back * uses expected per second / pages

A page of an adapter and a page of a prefix are the same memory, and a second spent copying weights is a second a
request waits just as one spent recomputing a prompt is. So both are priced in one currency, seconds saved per
second and page, and the cheapest goes. Seconds are measured (``costs.py``), the chance is learnt (``reuse.py``),
for adapters and blocks apart: nothing is weighted by hand.
"""

from __future__ import annotations

import math

from manylora.memory.eviction.costs import ReloadCosts
from manylora.memory.eviction.policy import Depth, IdleItem, ItemKey
from manylora.memory.eviction.ranking import Ranking
from manylora.memory.eviction.reuse import ReuseModel
from manylora.types import AdapterKey

__all__ = ["PriceEviction"]

SIZES_PER_OCTAVE = 4


class PriceEviction:
    """Cheapest first, of either kind.

    Args:
        costs: What bringing something back takes.
    """

    keeps_idle_adapters = True

    def __init__(self, costs: ReloadCosts) -> None:
        self._costs = costs
        self._adapter_reuse: ReuseModel[AdapterKey] = ReuseModel()
        self._block_reuse: ReuseModel[int] = ReuseModel()
        self._idle = Ranking(self.price)
        self._wanted = Ranking(self.price)

    def used(self, key: ItemKey, now: float) -> None:
        """Learn a gap."""
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
        """Put an item among those that differ from it in age alone (and by less than a fifth in size)."""
        if isinstance(item.key, str):
            # One that is waited for is no longer between two uses.
            learn = self._adapter_reuse.idle if depth is Depth.IDLE else self._adapter_reuse.group
            size = math.floor(SIZES_PER_OCTAVE * math.log2(item.num_pages))
            group = (learn(item.key, item.idle_since), size, item.read_bytes > 0)
        else:
            group = (self._block_reuse.idle(item.key, item.idle_since), -1, False)
        self._ranking(depth).add(item, group, item.idle_since)

    def remove(self, key: ItemKey) -> None:
        """Take an item out."""
        (self._idle if key in self._idle else self._wanted).remove(key)

    def evict(self, key: ItemKey, now: float) -> None:
        """Take out a dropped item. An adapter's gap goes on; a page number means another block from here on."""
        self.remove(key)
        if not isinstance(key, str):
            self._block_reuse.forget(key, now)

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the cheapest."""
        return self._ranking(depth).least(now, spare)

    def price(self, item: IdleItem, now: float) -> float:
        """Return seconds saved per second and page by keeping it."""
        if isinstance(item.key, str):
            rate = self._adapter_reuse.rate(item.key, now)
        else:
            rate = self._block_reuse.rate(item.key, now)
        return self._costs.reload_s(item) * rate / item.num_pages

    def _ranking(self, depth: Depth) -> Ranking:
        return self._idle if depth is Depth.IDLE else self._wanted
