"""The interface of cost models, the simplest one, of constants, and synthetic steps to ask a model about.

`lab/costs/roofline.py` derives one from a model's dimensions and a device's data sheet; `lab/costs/fitted.py` has
measured prices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from manylora.core.plan import AdapterLoad, PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, SamplingParams, Tier

__all__ = ["CostModel", "FixedCost", "SyntheticSequence", "synthetic_plan"]


class CostModel(Protocol):
    """Prices work for the simulated executor: once per step and once per load, so it must be fast."""

    def step_time_s(self, plan: StepPlan) -> float:
        """Return the duration of a step, in seconds."""
        ...

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return the duration of a load on an idle link, in seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCost:
    """A constant per step and per token, and rates of copies to the device and of reads from disk."""

    step_s: float = 0.02
    token_s: float = 0.0001
    copy_bytes_per_s: float = 16e9
    disk_bytes_per_s: float = 2e9

    def step_time_s(self, plan: StepPlan) -> float:
        """Return the duration of a step, in seconds."""
        return self.step_s + self.token_s * sum(part.num_tokens for part in plan.sequences)

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return the duration of a load on an idle link, in seconds."""
        if load.tier is Tier.HOST:
            return load.version.disk_bytes / self.disk_bytes_per_s
        return load.version.host_bytes / self.copy_bytes_per_s


class SyntheticSequence(NamedTuple):
    """A sequence of a synthetic step: ``num_tokens`` tokens behind ``start`` tokens of KV."""

    start: int
    num_tokens: int
    adapter: AdapterKey | None = None
    rank: int = 0


def synthetic_plan(parts: Iterable[SyntheticSequence]) -> StepPlan:
    """Return a step of these sequences, each of which yields a token: one token behind others is not its first.

    It has no pages, so it cannot be executed.
    """
    sampling = SamplingParams()
    return StepPlan(
        step_id=0,
        sequences=tuple(
            PlannedSequence(
                seq_id=index,
                tokens=range(part.start + part.num_tokens),
                num_prompt_tokens=max(0, part.start - 1) if part.num_tokens == 1 else part.start + part.num_tokens,
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
