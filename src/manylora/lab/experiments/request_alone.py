"""The time of a request on an idle replica, by part: the reference for slowdowns and SLOs."""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.errors import ConfigError
from manylora.core.plan import AdapterLoad
from manylora.core.types import AdapterVersion, Tier
from manylora.lab.costs.model import CostModel
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.sim.idle_engine import time_on_idle_engine
from manylora.lab.workloads import RequestSpec

__all__ = ["RequestAlone", "request_alone"]


@dataclass(frozen=True, slots=True)
class RequestAlone:
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


def request_alone(request: RequestSpec, version: AdapterVersion | None, cost: CostModel) -> RequestAlone:
    """Return the time of a request alone; ``version`` is its adapter, ``None`` for the base.

    Raises:
        ConfigError: The prices are measured ones, which say nothing of a step's parts.
    """
    if not isinstance(cost, RooflineCost):
        raise ConfigError("Experiments need a model and hardware by name: what a request takes alone is computed")
    rank = version.rank if version is not None else 0
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    base = time_on_idle_engine(cost, prompt, 1)
    whole = time_on_idle_engine(cost, prompt, output, rank=rank)
    return RequestAlone(
        load_s=cost.load_time_s(AdapterLoad(version=version, tier=Tier.DEVICE)) if version is not None else 0.0,
        base_s=base.ttft_s,
        adapter_s=whole.ttft_s - base.ttft_s,
        decode_s=whole.e2e_s - whole.ttft_s,
    )
