"""Policies of your own, to start from: an order of requests and an order of eviction.

    manylora simulate --rate 3 --policy examples/own_policy.py:least_work --eviction examples/own_policy.py:LeastUsed
    manylora simulate --rate 3 --policy examples/own_policy.py:least_work --policy-option answer_weight=2
    manylora experiment run examples/own-policy.toml --traces DIR

docs/own-policy.md and docs/own-eviction.md describe the inputs and the guarantees of a policy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from manylora.core.memory.eviction import ItemKey, KeyedEviction, ReloadCosts
from manylora.core.options import CheckedOptions, option
from manylora.core.plugins import takes
from manylora.core.scheduling import KeyedPolicy, Policy, PolicyContext, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(CheckedOptions):
    """How work is measured."""

    answer_weight: float = option(1.0, at_least=0, help="Tokens of a prompt that a token of an answer counts for.")


@takes(Work)
def least_work(context: PolicyContext) -> Policy:
    """Order requests by remaining work, least first: the prompt and the predicted answer."""
    weight: float = context.options.answer_weight

    def work(sequence: Sequence, now: float) -> float:
        answer = context.predictor.predict(sequence).p50 - sequence.num_output_tokens
        return sequence.num_to_run + weight * answer

    return KeyedPolicy(work)


class LeastUsed(KeyedEviction):
    """Evicts the adapter or prefix block with the fewest uses; of equals, the one idle for longest."""

    def __init__(self, costs: ReloadCosts) -> None:
        super().__init__(lambda item: self._num_uses[item.key])
        self._num_uses: Counter[ItemKey] = Counter()

    def used(self, key: ItemKey, now: float) -> None:
        """Count a use; an adapter that is loaded again is as popular as before."""
        self._num_uses[key] += 1

    def evict(self, key: ItemKey, now: float) -> None:
        """Drop the count of a block: its page will hold another one."""
        super().evict(key, now)
        if isinstance(key, int):
            del self._num_uses[key]
