"""Synthetic step plans, for which a cost model returns the duration of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, SamplingParams

__all__ = ["SyntheticSequence", "synthetic_plan"]


class SyntheticSequence(NamedTuple):
    """A sequence of a synthetic step: ``num_tokens`` tokens behind ``start`` tokens of KV."""

    start: int
    num_tokens: int
    adapter: AdapterKey | None = None
    rank: int = 0


def synthetic_plan(parts: Iterable[SyntheticSequence]) -> StepPlan:
    """Return a step of these sequences, each of which yields a token. It has no pages, so it cannot be executed."""
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
