"""The device's time by part of a step: a cost model that adds up the prices it returns.

Layers and attention take the longer of computing and reading, so their time is attributed to one of the two. A fitted
model knows only the sum.
"""

from __future__ import annotations

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.plan import AdapterLoad, StepPlan
from manylora.lab.costs.model import CostModel
from manylora.lab.costs.roofline import RooflineCost

__all__ = ["PARTS", "PriceMeter"]

PARTS = ("compute", "bandwidth", "adapters", "network", "host")
"""Parts of a step's time: arithmetic of the base, reading its weights and the KV, adapters' arithmetic, all-reduces
between devices, and the host (launches and the gap between two steps)."""


class PriceMeter:
    """Returns the prices of another cost model, and adds up the time of all steps."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.busy_s = 0.0
        self.num_steps = 0
        self.parts_s = dict.fromkeys(PARTS, 0.0)

    def step_time_s(self, plan: StepPlan) -> float:
        """Return the duration of a step, in seconds."""
        self.num_steps += 1
        if isinstance(self.cost, RooflineCost):
            seconds = self._split(self.cost, step_features(plan))
        else:
            seconds = self.cost.step_time_s(plan)
        self.busy_s += seconds
        return seconds

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return the duration of a load on an idle link, in seconds."""
        return self.cost.load_time_s(load)

    def shares(self) -> dict[str, float]:
        """Return the share of each part in all the time of steps; empty where they are unknown."""
        total = sum(self.parts_s.values())
        return {name: seconds / total for name, seconds in self.parts_s.items()} if total else {}

    def _split(self, cost: RooflineCost, step: StepFeatures) -> float:
        priced = cost.price(step)
        dims, rates = cost.dims, cost.rates
        scores = step.context_tokens + step.prompt_pairs
        computing_s = (
            (priced.layers_s, 2 * dims.active_weights * step.num_tokens / rates.flops_per_s),
            (priced.attention_s, 4 * dims.num_layers * dims.q_size * scores / rates.flops_per_s),
            (priced.head_s, 2 * dims.head_weights * step.num_sampled / rates.flops_per_s),
        )
        parts = self.parts_s
        for seconds, least_s in computing_s:
            parts["compute" if least_s > 0.9 * seconds else "bandwidth"] += seconds
        parts["adapters"] += priced.adapters_s
        parts["network"] += priced.network_s
        parts["host"] += priced.launches_s + priced.host_s
        return sum(priced)
