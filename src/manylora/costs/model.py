"""What a step and a copy cost: the interface, and the simplest model, of three constants.

`costs/roofline.py` has the one that is derived from a model's dimensions and a device's data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from manylora.plan import AdapterLoad, StepPlan
from manylora.types import Tier

__all__ = ["CostModel", "FixedCost"]


class CostModel(Protocol):
    """Prices work for the simulated executor; asked once per step and once per load, so it must be quick."""

    def step_time_s(self, plan: StepPlan) -> float:
        """Return how long a step takes, in seconds."""
        ...

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return how long a load takes on an idle link, in seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCost:
    """A step costs a constant and so much per token; a load so much per byte.

    Args:
        step_s: Seconds per step.
        token_s: Seconds per token in it.
        copy_bytes_per_s: Host to device.
        disk_bytes_per_s: Disk to host.
    """

    step_s: float = 0.02
    token_s: float = 0.0001
    copy_bytes_per_s: float = 16e9
    disk_bytes_per_s: float = 2e9

    def step_time_s(self, plan: StepPlan) -> float:
        """Return how long a step takes, in seconds."""
        return self.step_s + self.token_s * sum(part.num_tokens for part in plan.sequences)

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return how long a load takes on an idle link, in seconds."""
        if load.tier is Tier.HOST:
            return load.version.disk_bytes / self.disk_bytes_per_s
        return load.version.host_bytes / self.copy_bytes_per_s
