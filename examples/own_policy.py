"""Policies of your own, to start from: an order of requests and an order of eviction.

    manylora simulate --rate 3 --policy examples/own_policy.py:least_work --eviction examples/own_policy.py:least_used
    manylora experiment run examples/own-policy.toml --traces DIR

docs/scheduling.md and docs/memory.md describe the inputs and the guarantees of a policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from manylora.memory.eviction import ByAge, EvictionPolicy, IdleItem, ItemKey, ReloadCosts
from manylora.scheduling import KeyedPolicy, Policy, PolicyContext, Sequence
from manylora.types import AdapterKey


def least_work(context: PolicyContext) -> Policy:
    """Order requests by remaining work, least first: the prompt and the predicted answer."""

    def work(sequence: Sequence, now: float) -> float:
        return sequence.num_to_run + context.predictor.predict(sequence).p50 - sequence.num_output_tokens

    return KeyedPolicy(work)


def least_used(costs: ReloadCosts) -> EvictionPolicy:
    """Evict the adapter with the fewest uses; of equals, the one idle for longest."""
    return ByAge(Uses())


class Uses:
    """Values an adapter by the number of its uses."""

    def __init__(self) -> None:
        self._num_uses: Counter[ItemKey] = Counter()

    def used(self, key: AdapterKey, now: float) -> None:
        """Count a use."""
        self._num_uses[key] += 1

    def forget(self, key: AdapterKey) -> None:
        """Drop the count of an unloaded adapter."""
        del self._num_uses[key]

    def evicted(self, item: IdleItem) -> None:
        """Keep the count: an adapter that is loaded again is as popular as before."""

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """Group adapters of one count; inside, the one idle for longest comes first."""
        return self._num_uses[item.key], item.idle_since

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """Return nothing: counts of idle adapters do not change."""
        return ()

    def worth(self, item: IdleItem, now: float) -> float:
        """Return its count."""
        return float(self._num_uses[item.key])
