"""A batch in a process: the prompt step, then decoding in stretches of equal batch size.

A stretch lasts until the next sequence ends; its steps are priced at the mean context. A step's time is linear in its
context within one regime of the cost model, so this is the sum over its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from manylora.core.costs.features import StepFeatures
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.functions.catalog import SimulatedFunction
from manylora.lab.workloads import RequestSpec

__all__ = ["Call", "Stretch", "decode_stretch", "prompt_s"]


@dataclass(slots=True, eq=False)
class Call:
    """A request to a function, and its course.

    Args:
        number: Its place in the workload.
        spec: Lengths and arrival.
        left: Tokens to generate after those it has; in the midst of a stretch it may be a fraction.
        waited_s: Seconds in which it waited for stages of a cold start, by stage.
    """

    number: int
    function: SimulatedFunction
    spec: RequestSpec
    left: float = 0.0
    started_at: float | None = None
    answered_from: float | None = None
    finished_at: float | None = None
    device: int = 0
    batch_size: int = 0
    waited_s: dict[str, float] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        """Bytes of its KV at its end."""
        tokens = self.spec.num_prompt_tokens + self.spec.num_output_tokens
        return tokens * self.function.model.kv_bytes_per_token


def prompt_s(cost: RooflineCost, prompts: Sequence[tuple[int, SimulatedFunction]]) -> float:
    """Return the device time of one step of whole prompts, each with its number of tokens and function."""
    tokens = sum(one for one, _ in prompts)
    ranks = {function.name: function.rank for _, function in prompts}
    return sum(
        cost.price(
            StepFeatures(
                num_decodes=0,
                num_prompts=len(prompts),
                num_prompt_tokens=tokens,
                num_sampled=len(prompts),
                context_tokens=0,
                prompt_pairs=sum(one * (one + 1) // 2 for one, _ in prompts),
                num_adapters=len(ranks),
                sum_rank=sum(ranks.values()),
                max_rank=max(ranks.values()),
                num_adapted_decodes=0,
                decode_row_rank=0,
                prompt_row_rank=sum(one * function.rank for one, function in prompts),
                prompt_context_tokens=tokens,
                num_adapted_prompts=len(prompts),
                num_adapted_prompt_tokens=tokens,
                prompt_rank=sum(function.rank for _, function in prompts),
                num_ranks=len(set(ranks.values())),
            )
        )
    )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Decode steps of one batch.

    Args:
        num_steps: Number of steps.
        work_s: Their device time.
    """

    num_steps: float
    work_s: float


def decode_stretch(cost: RooflineCost, calls: Sequence[Call]) -> Stretch:
    """Return the steps until the first of the calls ends."""
    num_steps = min(call.left for call in calls)
    ranks = {call.function.name: call.function.rank for call in calls}
    context = sum(call.spec.num_prompt_tokens + call.spec.num_output_tokens - 1 - call.left for call in calls)
    row_rank = sum(call.function.rank for call in calls)
    parts = cost.price(
        StepFeatures(
            num_decodes=len(calls),
            num_prompts=0,
            num_prompt_tokens=0,
            num_sampled=len(calls),
            context_tokens=round(context + len(calls) * (num_steps + 1) / 2),
            prompt_pairs=0,
            num_adapters=len(ranks),
            sum_rank=sum(ranks.values()),
            max_rank=max(ranks.values()),
            num_adapted_decodes=len(calls),
            decode_row_rank=row_rank,
            prompt_row_rank=0,
            num_ranks=len(set(ranks.values())),
        )
    )
    return Stretch(num_steps, num_steps * sum(parts))
