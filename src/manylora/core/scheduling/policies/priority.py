"""By the priority that requests bring (lower is sooner), and by arrival among those of one priority.

vLLM's order by priority is strict: a stream of urgent requests starves all others. Here a level is worth a time of
waiting. A request's key is its arrival plus that time for every level, which never changes while it waits.

No request starves: one of level p is passed only by requests of a lower level q that come less than ``(p - q) *
priority_step_s`` seconds after it. The first in line stays so until admitted, is offered first, and is passed a bounded
number of times.

Source: vLLM's ``--scheduling-policy priority``; the worth of a level is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.options import check_options, option
from manylora.core.scheduling.policies.keyed import KeyedPolicy
from manylora.core.scheduling.policy import PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["PriorityPolicy"]

FURTHEST_LEVEL = 1000
"""Levels beyond this, from 0, count as this: a request may bring any number."""


class PriorityPolicy(KeyedPolicy):
    """Offers the first in line, then the most urgent."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """The worth of a level."""

        priority_step_s: float = option(
            60.0,
            panel="Scheduling",
            unit="s",
            above=0,
            help="Under priority: time of waiting that makes up for one level.",
        )

        def __post_init__(self) -> None:
            check_options(self)

    def __init__(self, context: PolicyContext) -> None:
        step_s: float = context.options.priority_step_s

        def key(sequence: Sequence, now: float) -> float:
            level = max(-FURTHEST_LEVEL, min(FURTHEST_LEVEL, sequence.request.priority))
            return sequence.arrived_at + step_s * level

        super().__init__(key, ages=True)
