"""Plans of steps that are not run, to ask a cost model for their time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from manylora.plan import PlannedSequence, StepPlan
from manylora.types import AdapterKey, SamplingParams

__all__ = ["Part", "synthetic_plan"]


class Part(NamedTuple):
    """A sequence in a made-up step.

    Args:
        start: Tokens of KV that are there.
        num_tokens: Tokens to run behind them.
        adapter: Its adapter; ``None`` for the base.
        rank: The adapter's rank; 0 for the base.
    """

    start: int
    num_tokens: int
    adapter: AdapterKey | None = None
    rank: int = 0


def synthetic_plan(parts: Iterable[Part]) -> StepPlan:
    """Return a step of these sequences, each of which yields a token; it can be priced and not run: it has no pages."""
    sampling = SamplingParams()
    return StepPlan(
        step_id=0,
        sequences=tuple(
            PlannedSequence(
                seq_id=index,
                tokens=range(part.start + part.num_tokens),
                num_prompt_tokens=part.start + part.num_tokens,
                start=part.start,
                num_tokens=part.num_tokens,
                pages=(),
                adapter=part.adapter,
                rank=part.rank,
                sampling=sampling,
                is_sampled=True,
                seed=0,
            )
            for index, part in enumerate(parts)
        ),
    )
