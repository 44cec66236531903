"""What a step and a copy cost: the first, simplest model, of three constants."""

from __future__ import annotations

from dataclasses import dataclass

from manylora.engine.ports import AdapterLoad, StepPlan
from manylora.types import Tier

__all__ = ["FixedCost"]


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
