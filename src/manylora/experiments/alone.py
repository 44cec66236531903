"""What a request takes when it is alone: the yardstick of slowdowns, and of a promise that is a multiple of it.

By the same prices as a simulated run: one step for the prompt, whole, and one for every further token. A step's price
grows evenly with its context, so the steps of decoding are priced at the middle one. A test compares it with a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from manylora.engine.ports import AdapterLoad, PlannedSequence, StepPlan
from manylora.sim.cost import CostModel
from manylora.types import AdapterVersion, SamplingParams, Tier
from manylora.workloads import RequestSpec

__all__ = ["Alone", "plan_of", "time_alone"]

_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class Alone:
    """A request by itself on an idle replica, its adapter on the host; times in seconds.

    Args:
        load_s: Bringing its adapter to the device.
        base_s: The step of its prompt, without the adapter's part.
        adapter_s: The adapter's part of that step.
        decode_s: All further steps.
    """

    load_s: float
    base_s: float
    adapter_s: float
    decode_s: float

    @property
    def ttft_s(self) -> float:
        """Time to its first token."""
        return self.load_s + self.base_s + self.adapter_s

    @property
    def e2e_s(self) -> float:
        """Time to its last token."""
        return self.ttft_s + self.decode_s


def time_alone(request: RequestSpec, version: AdapterVersion | None, cost: CostModel) -> Alone:
    """Return what a request takes alone.

    Args:
        request: Its lengths.
        version: Its adapter; ``None`` for the base.
        cost: Prices of steps and loads.
    """
    prompt = request.num_prompt_tokens
    base_s = cost.step_time_s(plan_of([(0, prompt, None)]))
    num_decodes = request.num_output_tokens - 1
    middle = prompt + num_decodes // 2
    return Alone(
        load_s=cost.load_time_s(AdapterLoad(version=version, tier=Tier.DEVICE)) if version is not None else 0.0,
        base_s=base_s,
        adapter_s=cost.step_time_s(plan_of([(0, prompt, version)])) - base_s if version is not None else 0.0,
        decode_s=num_decodes * cost.step_time_s(plan_of([(middle, 1, version)])) if num_decodes else 0.0,
    )


def plan_of(parts: Iterable[tuple[int, int, AdapterVersion | None]]) -> StepPlan:
    """Return a step to be priced.

    Args:
        parts: Tokens of KV that are there, tokens to run, and the adapter, of each sequence.
    """
    return StepPlan(
        step_id=0,
        sequences=tuple(
            PlannedSequence(
                seq_id=place,
                tokens=range(start + num_tokens),
                num_prompt_tokens=start + num_tokens,
                start=start,
                num_tokens=num_tokens,
                pages=(),
                adapter=version.key if version is not None else None,
                rank=version.rank if version is not None else 0,
                sampling=_SAMPLING,
                is_sampled=True,
                seed=0,
            )
            for place, (start, num_tokens, version) in enumerate(parts)
        ),
    )
