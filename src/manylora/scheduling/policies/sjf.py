"""Shortest job first with ageing: by predicted tokens still to come, less what the request has waited for.

A request's key is its predicted tokens plus ``ageing * arrival time``. Among those waiting at any moment that is
the order of "predicted tokens minus ``ageing`` per second waited", and it never changes while they wait, so
a sorted list is enough and nothing is recomputed as time goes on.

No request starves: a newcomer goes ahead only of those that have waited less than ``(their length - its length) /
ageing`` seconds, so every request gets to the front. The first in line stays so until admitted and is offered first,
and is passed a bounded number of times.

Source: the shortest-job-first scheduler of uServe, as section 5.3 of the Chameleon paper compares with. Neither
gives a rate of ageing; ours is what one request decodes in a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.options import check_options, option
from manylora.scheduling.policies.keyed import KeyedPolicy
from manylora.scheduling.policy import PolicyContext
from manylora.scheduling.sequence import Sequence

__all__ = ["ShortestFirstPolicy"]


class ShortestFirstPolicy(KeyedPolicy):
    """Offers the first in line, then the shortest; a pre-empted one comes back with the length that is left of it."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """How fast waiting counts."""

        ageing_tokens_per_s: float = option(
            50.0,
            panel="Scheduling",
            flag="--ageing",
            metavar="TOKENS",
            unit="tokens per second",
            above=0,
            help="Under sjf: predicted tokens that a second of waiting makes up for.",
        )

        def __post_init__(self) -> None:
            check_options(self)

    def __init__(self, context: PolicyContext) -> None:
        ageing: float = context.options.ageing_tokens_per_s

        def key(sequence: Sequence, now: float) -> float:
            tokens = context.predictor.predict(sequence).p50 - sequence.num_output_tokens
            return tokens + ageing * sequence.arrived_at

        super().__init__(key, ages=True)
