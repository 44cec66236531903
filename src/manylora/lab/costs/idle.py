"""The time of a request on an idle engine, by part: the reference for slowdowns and SLOs.

Chameleon and many others set the SLO to five times the mean duration of a request on an idle engine. There a prompt is
one step, and every token after the first is another step, with one more token of context each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.errors import ConfigError
from manylora.core.plan import AdapterLoad
from manylora.core.types import AdapterKey, AdapterVersion, Tier
from manylora.lab.costs.model import CostModel, SyntheticSequence, synthetic_plan
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.workloads import RequestSpec

__all__ = ["IdleEngineTimes", "decode_step", "prompt_step", "time_on_idle_engine", "times_on_idle_engine"]


@dataclass(frozen=True, slots=True)
class IdleEngineTimes:
    """A request on an idle engine; times in seconds."""

    load_s: float  # copy of its adapter to the device
    base_s: float  # the step of its prompt, without the adapter's part
    adapter_s: float  # the adapter's part of that step
    decode_s: float  # all further steps

    @property
    def ttft_s(self) -> float:
        """Time to the request's first token."""
        return self.load_s + self.base_s + self.adapter_s

    @property
    def e2e_s(self) -> float:
        """Time to the request's last token."""
        return self.ttft_s + self.decode_s


def time_on_idle_engine(
    cost: RooflineCost, num_prompt_tokens: int, num_output_tokens: int, *, rank: int = 0, load_s: float = 0.0
) -> IdleEngineTimes:
    """Return the times of a request on an idle engine, with its prompt in one step and at least one output token.

    ``rank`` is 0 for the base; ``load_s`` is the time to load its adapter before the prompt runs.
    """
    base_s = sum(cost.price(prompt_step(num_prompt_tokens)))
    num_steps = num_output_tokens - 1
    # A decode step's time is linear in its context, so the mean of the first and the last is the mean of all.
    first, last = (sum(cost.price(decode_step(num_prompt_tokens + done, rank))) for done in (1, max(1, num_steps)))
    return IdleEngineTimes(
        load_s=load_s,
        base_s=base_s,
        adapter_s=sum(cost.price(prompt_step(num_prompt_tokens, rank))) - base_s,
        decode_s=num_steps * (first + last) / 2,
    )


def times_on_idle_engine(
    requests: Sequence[RequestSpec], versions: Mapping[str, AdapterVersion], cost: CostModel
) -> list[IdleEngineTimes]:
    """Return the times of every request of a workload on an idle engine, its adapter in host memory.

    ``ConfigError`` if the prices are measured ones, which say nothing of a step's parts.
    """
    if not isinstance(cost, RooflineCost):
        raise ConfigError("Experiments need a model and hardware by name: a measured profile has no parts of a step")
    ranks = {name: version.rank for name, version in versions.items()}
    loads_s = {name: cost.load_time_s(AdapterLoad(version=one, tier=Tier.DEVICE)) for name, one in versions.items()}
    return [
        time_on_idle_engine(
            cost,
            one.num_prompt_tokens,
            one.num_output_tokens,
            rank=ranks.get(one.adapter or "", 0),
            load_s=loads_s.get(one.adapter or "", 0.0),
        )
        for one in requests
    ]


def prompt_step(num_tokens: int, rank: int = 0) -> StepFeatures:
    """Return a step of one whole prompt of more than one token; rank 0 is the base."""
    return _step(SyntheticSequence(0, num_tokens), rank)


def decode_step(context_tokens: int, rank: int = 0) -> StepFeatures:
    """Return a step of one sequence that decodes, and reads ``context_tokens`` of KV; rank 0 is the base."""
    return _step(SyntheticSequence(context_tokens - 1, 1), rank)


def _step(sequence: SyntheticSequence, rank: int) -> StepFeatures:
    adapter = AdapterKey("0") if rank else None
    return step_features(synthetic_plan([sequence._replace(adapter=adapter, rank=rank)]))
