"""Shortest job first with ageing: by predicted remaining tokens, less a credit for the time waited.

A request's key is its predicted tokens plus ``ageing * arrival time``. At any moment that is the order of "predicted
tokens minus ``ageing`` per second waited", and it never changes while requests wait, so a sorted list is enough.

No request starves: a new one goes ahead only of those that have waited less than ``(their length - its length) /
ageing`` seconds, so every request gets to the front. The first in line stays so until admitted, is offered first,
and is passed a bounded number of times.

Source: the shortest-job-first scheduler of uServe, as compared with in section 5.3 of the Chameleon paper. Neither
gives a rate of ageing; ours is the decoding rate of one request.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.options import check_options, option
from manylora.core.scheduling.policies.keyed import KeyedPolicy
from manylora.core.scheduling.policy import PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["ShortestFirstPolicy"]


class ShortestFirstPolicy(KeyedPolicy):
    """Offers the first in line, then the shortest; a pre-empted one comes back with its remaining length."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """The rate of ageing."""

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
