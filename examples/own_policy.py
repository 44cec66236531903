"""Policies of your own, to start from: an order of requests and an order of eviction.

    manylora simulate --rate 3 --policy examples/own_policy.py:least_work --eviction examples/own_policy.py:least_used
    manylora simulate --rate 3 --policy examples/own_policy.py:least_work --policy-option answer_weight=2
    manylora experiment run examples/own-policy.toml --traces DIR

docs/scheduling.md and docs/memory.md describe the inputs and the guarantees of a policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from manylora.core.memory.eviction import ByAge, EvictionPolicy, IdleItem, ItemKey, ReloadCosts
from manylora.core.options import check_options, option
from manylora.core.plugins import takes
from manylora.core.scheduling import KeyedPolicy, Policy, PolicyContext, Sequence
from manylora.core.types import AdapterKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How work is measured."""

    answer_weight: float = option(1.0, at_least=0, help="Tokens of a prompt that a token of an answer counts for.")

    def __post_init__(self) -> None:
        check_options(self)


@takes(Work)
def least_work(context: PolicyContext) -> Policy:
    """Order requests by remaining work, least first: the prompt and the predicted answer."""
    weight: float = context.options.answer_weight

    def work(sequence: Sequence, now: float) -> float:
        answer = context.predictor.predict(sequence).p50 - sequence.num_output_tokens
        return sequence.num_to_run + weight * answer

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
