"""One order over idle adapters and idle prefix blocks, by the time that keeping each saves per page.

::

    price = seconds to reload it * uses expected per second / pages

Adapters and prefixes use the same memory, and a request waits for copies of weights as for recomputed prompts. So both
have a price in the same unit, seconds saved per second and page, and the cheapest item is dropped. Reload times are
measured (``policy.py``); no weight is set by hand.

The rate of reuse is a hazard rate, learnt online from gaps between uses, for adapters and blocks separately. Whether
*frequency* or *recency* predicts reuse depends on the workload (independent draws: only frequency; sessions:
almost only recency). So the rate is a product

::

    rate(item, age) = popularity[class] * ageing[age]          per second
                       by uses so far      by seconds idle      (classes and ages in steps of sqrt 2 and 2)

which is a proportional-hazards model with both factors free. They are fitted together to counts of uses and to time at
risk: the seconds that items of each class were idle at each age, whether or not a use followed. An item that is evicted
(blocks) or not used again (adapters) thus counts as evidence against reuse, and popularity is told apart from youth:
for independent draws the fit finds ``ageing`` flat, for sessions steep.

The prior of an item used once is the history of other items used once. Uses and evidence fade (half after
``HALF_LIFE`` uses of any item), so the fit follows a workload that drifts.

Source: the hazard rate per byte bounds every policy without knowledge of the future: Panigrahy et al., "A new
upper bound on cache hit probability for non-anticipative caching policies" (2020); classes and online counting after
Beckmann et al., LHD (NSDI '18); the factors by iterative proportional fitting of a Poisson model.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from operator import add
from typing import Generic, TypeVar

import numpy as np

from manylora.core.memory.eviction.policy import Depth, EvictionPolicy, IdleItem, ItemKey, ReloadCosts
from manylora.core.memory.eviction.ranking import Ranking
from manylora.core.types import AdapterKey

__all__ = ["PriceEviction", "ReuseModel"]

SIZES_PER_OCTAVE = 4
HALF_LIFE = 2000  # uses of any item after which a use counts half
CLASSES_PER_OCTAVE = 2
NUM_CLASSES = 28
FIRST_AGE, NUM_AGES = -10, 36
"""Ages from 2**-10 s to 2**25 s, a bucket per octave; younger and older fall into the first and last."""
_ENDS = [2.0 ** (FIRST_AGE + bucket) for bucket in range(NUM_AGES)]
_WIDTHS = [end / 2 for end in _ENDS]  # of all but the first, which begins at 0
FIT_EVERY = 128
FADE = 0.985  # weight that evidence keeps from one fit to the next: half after some 6,000 uses
NUM_PASSES = 2

_Key = TypeVar("_Key", bound=Hashable)


class PriceEviction(EvictionPolicy):
    """Drops the cheapest item of either kind first."""

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


@dataclass(slots=True)
class _History:
    num_uses: float = 0.0  # faded
    counted_at: int = 0  # uses of any item by then
    since: float = 0.0  # begin or end of its last use
    is_idle: bool = False
    group: int = 0  # class when last idle
    booked_s: float = 0.0  # age up to which its time at risk is in the table


class ReuseModel(Generic[_Key]):
    """Learns the gaps between uses of one kind of item, and returns rates."""

    def __init__(self) -> None:
        self._histories: OrderedDict[_Key, _History] = OrderedDict()  # in the order of the next booking
        self._num_uses = 0
        ages = 2.0 ** (FIRST_AGE + np.arange(NUM_AGES) - 0.5)  # middle of each bucket, in seconds
        self._typical_s = ages
        self._uses_by_class = [0.0] * NUM_CLASSES
        self._uses_by_age = [0.0] * NUM_AGES
        self._at_risk = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]  # seconds
        # The prior depends only on age: rate 1 / age, which is LRU.
        self._ageing: list[float] = (1.0 / ages).tolist()
        self._popularity = [1.0] * NUM_CLASSES

    def used(self, key: _Key, now: float) -> None:
        """Record that a request needs ``key``, idle or not, present or evicted."""
        self._num_uses += 1
        history = self._history(key, now)
        if history.is_idle:
            age = now - history.since
            self._book(history, age)
            self._uses_by_class[history.group] += 1.0
            self._uses_by_age[_bucket(age)] += 1.0
            history.is_idle = False
        history.since = now
        faded = 0.5 ** ((self._num_uses - history.counted_at) / HALF_LIFE)
        history.num_uses = history.num_uses * faded + 1.0
        history.counted_at = self._num_uses
        self._book_others(now)
        if self._num_uses % FIT_EVERY == 0:
            self._fit()

    def idle(self, key: _Key, now: float) -> int:
        """Record that ``key`` is idle since ``now`` and return its class; a repeated call changes nothing."""
        history = self._history(key, now)
        if history.is_idle:
            if history.since == now:
                return history.group  # the same gap
            self._book(history, now - history.since)
        history.is_idle = True
        history.since = now
        history.booked_s = 0.0
        history.group = _class(history.num_uses)
        return history.group

    def forget(self, key: _Key, now: float) -> None:
        """Book the time at risk of an item and remove it."""
        history = self._histories.pop(key, None)
        if history is not None and history.is_idle:
            self._book(history, now - history.since)

    def group(self, key: _Key, now: float) -> int:
        """Return the class of an item; items of a class have one popularity."""
        return self._history(key, now).group

    def rate(self, key: _Key, now: float) -> float:
        """Return the current rate of reuse of an item, per second."""
        history = self._histories.get(key) or self._history(key, now)
        return self._popularity[history.group] * self._ageing[_bucket(now - history.since)]

    def _history(self, key: _Key, now: float) -> _History:
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = _History(counted_at=self._num_uses, since=now)
        return history

    def _book_others(self, now: float) -> None:
        """Book the time at risk of two items in turn, so that the cost is spread over uses."""
        for _ in range(2):
            key = next(iter(self._histories))
            self._histories.move_to_end(key)
            history = self._histories[key]
            if history.is_idle:
                self._book(history, now - history.since)

    def _book(self, history: _History, age: float) -> None:
        """Add the seconds at risk from the last booking up to ``age`` to the table, bucket by bucket."""
        row, begin = self._at_risk[history.group], history.booked_s
        first, last = _bucket(begin) if begin else 0, _bucket(age)
        if first < last:
            row[first] += _ENDS[first] - begin
            row[first + 1 : last] = map(add, row[first + 1 : last], _WIDTHS[first + 1 : last])
            begin = _ENDS[last - 1]
        if age > begin:
            row[last] += age - begin
        history.booked_s = max(age, history.booked_s)

    def _fit(self) -> None:
        """Fit both factors in turn, from their last values; a factor without evidence returns to its prior."""
        at_risk = np.array(self._at_risk)
        by_class, by_age = np.array(self._uses_by_class), np.array(self._uses_by_age)
        popularity, ageing = np.array(self._popularity), np.array(self._ageing)
        for _ in range(NUM_PASSES):
            # One more use and one more expected use: a prior of one observation.
            popularity = (by_class + 1.0) / (at_risk @ ageing + 1.0)
            # Only the product is determined: keep the typical use at popularity 1, or both factors drift.
            popularity /= np.exp(by_class @ np.log(popularity) / max(1.0, by_class.sum()))
            ageing = (by_age + 1.0) / (popularity @ at_risk + self._typical_s)
        self._popularity, self._ageing = popularity.tolist(), ageing.tolist()
        self._uses_by_class = (by_class * FADE).tolist()
        self._uses_by_age = (by_age * FADE).tolist()
        self._at_risk = (at_risk * FADE).tolist()


def _bucket(age: float) -> int:
    """Return the bucket of an age: bucket ``b`` holds ages in ``[2**(FIRST_AGE + b - 1), 2**(FIRST_AGE + b))``."""
    bucket = math.frexp(age)[1] - FIRST_AGE
    if bucket <= 0 or age <= 0.0:
        return 0
    return bucket if bucket < NUM_AGES else NUM_AGES - 1


def _class(num_uses: float) -> int:
    """Return the class of a faded number of uses; class 4 begins at one use, lower classes have faded."""
    if num_uses <= 0.0:
        return 0
    return min(max(4 + math.floor(CLASSES_PER_OCTAVE * math.log2(num_uses) + 1e-9), 1), NUM_CLASSES - 1)
