"""FastLibra's rule: one cost for adapters and the KV that they computed, and no KV without its adapter.

::

    worth = uses that fade * seconds to bring it back / pages        adapters also * max(1, needed / on the device)

    adapter A                     stays while it has idle blocks: they are of no use without it
       |- block <- block          go first, from the end of a prompt
    adapter B                     has none, and competes with all blocks by worth

*Needed* is the number of distinct adapters that a batch is expected to name, by their shares ``p`` of recent uses:
``sum(1 - (1 - p)**BATCH)``. Uses fade exponentially: the worth of every item falls by the same factor, which leaves
their order, so an item has one number while it is idle.

Source: Zhang et al. (arXiv 2505.03756): dependencies in one pool, dropped by one cost model. Its abstract, from which
this was made, has no formula; factors and constants are a reading. There KV comes back from host memory, here by
running the prompt again.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from manylora.core.memory.eviction.policy import Depth, EvictionPolicy, IdleItem, ItemKey, ReloadCosts
from manylora.core.memory.eviction.ranking import Ranking
from manylora.core.types import AdapterKey

__all__ = ["FastLibraEviction"]

BATCH = 32
HALF_LIFE_S = 6.0  # the best of 6, 15, 60, 150 and 300 in conversations: the kindest reading
COUNT_EVERY = 64  # uses of adapters from one count of those needed to the next
LEAST_S = 1e-9  # of a reload whose measured cost is 0


class FastLibraEviction(EvictionPolicy):
    """Drops the item of least worth, of adapters only those without idle blocks."""

    def __init__(self, costs: ReloadCosts) -> None:
        self._costs = costs
        self._uses: dict[ItemKey, float] = {}  # log2 of the sum of 2**(time / HALF_LIFE_S) over uses
        self._worth: dict[ItemKey, float] = {}  # log2, of items that may be dropped
        self._blocks, self._leaves, self._wanted = (Ranking(lambda item, now: self._worth[item.key]) for _ in range(3))
        self._parents: dict[AdapterKey, IdleItem] = {}  # idle adapters with idle blocks
        self._num_blocks: Counter[AdapterKey] = Counter()  # idle blocks of each adapter
        self._on_device: dict[AdapterKey, None] = {}  # adapters that have been idle there
        self._needed, self._num_uncounted = 0.0, COUNT_EVERY

    def used(self, key: ItemKey, now: float) -> None:
        """Count a use."""
        self._uses[key] = float(np.logaddexp2(self._uses.get(key, -math.inf), now / HALF_LIFE_S))
        self._num_uncounted += isinstance(key, str)

    def forget(self, key: AdapterKey, now: float) -> None:
        """Drop an adapter's uses."""
        self._uses.pop(key, None)
        self._on_device.pop(key, None)

    def add(self, item: IdleItem, depth: Depth) -> None:
        """Rank an item by its uses so far; a block is used when it is computed."""
        key, adapter = item.key, item.adapter
        uses = self._uses.setdefault(key, item.idle_since / HALF_LIFE_S)
        self._worth[key] = uses + math.log2(max(LEAST_S, self._costs.reload_s(item)) / item.num_pages)
        if isinstance(key, str):
            self._on_device[key] = None
            if depth is Depth.IDLE and self._num_blocks[key]:
                self._parents[key] = item
                return
        elif adapter is not None:
            self._num_blocks[adapter] += 1
            if adapter in self._leaves:
                self._parents[adapter] = self._leaves.remove(adapter)
        ranking = self._wanted if depth is Depth.WANTED else self._leaves if isinstance(key, str) else self._blocks
        ranking.add(item, None, self._worth[key])

    def remove(self, key: ItemKey) -> None:
        """Remove an item. With the last of its blocks an adapter may be dropped."""
        if isinstance(key, str):
            if self._parents.pop(key, None) is None:
                (self._leaves if key in self._leaves else self._wanted).remove(key)
        elif (adapter := self._blocks.remove(key).adapter) is not None:
            self._num_blocks[adapter] -= 1
            if not self._num_blocks[adapter]:
                del self._num_blocks[adapter]
                if adapter in self._parents:
                    self._leaves.add(self._parents.pop(adapter), None, self._worth[adapter])

    def evict(self, key: ItemKey, now: float) -> None:
        """Remove a dropped item. An adapter's uses stay; a page number will be reused for another block."""
        self.remove(key)
        del self._worth[key]
        if isinstance(key, str):
            self._on_device.pop(key, None)
        else:
            del self._uses[key]

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the block or the adapter of less worth."""
        if depth is Depth.WANTED:
            return self._wanted.least(now, spare)
        adapter, block = self._leaves.least(now, spare), self._blocks.least(now)
        if adapter is None or block is None:
            return adapter or block
        return adapter if self._worth[adapter.key] + self._reward() < self._worth[block.key] else block

    def _reward(self) -> float:
        """Return log2 of the factor on the worth of adapters."""
        if self._num_uncounted >= COUNT_EVERY:
            self._num_uncounted = 0
            uses = np.array([log2 for key, log2 in self._uses.items() if isinstance(key, str)])
            weights = np.exp2(uses - uses.max())  # an adapter was used: one is compared with a block
            self._needed = float((1.0 - (1.0 - weights / weights.sum()) ** BATCH).sum())
        return math.log2(max(1.0, self._needed / max(1, len(self._on_device))))
