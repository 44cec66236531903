"""The fitted cost model: steps and loads at the price a live engine measured."""

from __future__ import annotations

from random import Random

from manylora.costs.features import StepFeatures, step_features
from manylora.costs.profile import CostProfile, DriftComponent, Noise, StepCost
from manylora.costs.speed import DriftingSpeed, MachineSpeed
from manylora.plan import AdapterLoad, StepPlan
from manylora.types import Tier

__all__ = ["FittedCost"]


class FittedCost:
    """Prices work by a profile.

    Without ``rng`` a step costs what such steps cost on the mean, and two equal steps the same: averages come out
    right, and tails too thin, for a machine is never as even. With it, each step is longer or shorter by a factor
    drawn from those that were measured. What of that has a memory is not this model's, for it is not told the time: a
    profile with components makes ``speed`` give the executor what wanders, and draws here what is left within a spell.

    ``interference`` is for the executor too: how much loads slow down the step beside them, by tier.

    Args:
        profile: What was measured.
        rng: Draws the jitter; none without it.
        has_drift: Leave what has a memory to ``speed``, where the profile knows of it. Without, all jitter is drawn
            here, step by step.
    """

    def __init__(self, profile: CostProfile, rng: Random | None = None, *, has_drift: bool = True) -> None:
        self._step = StepCost(profile.terms, profile.rows)
        self._turn_s, self._turn_sequence_s = profile.turn_s, profile.turn_sequence_s
        self._loads = profile.loads
        self._noise = profile.noise
        self._rng = rng
        self._components: tuple[DriftComponent, ...] = ()
        self._seed = 0
        if rng is not None and has_drift and profile.speed_drift is not None:
            self._components = profile.speed_drift.components
            self._noise = {**profile.noise, **profile.speed_drift.noise}
            self._seed = rng.getrandbits(64)
        self.interference: dict[Tier, float] = {Tier(tier): one for tier, one in profile.interference.items()}

    def step_time_s(self, plan: StepPlan) -> float:
        """Return how long a step takes from turn to turn of the loop, in seconds."""
        return self.features_time_s(step_features(plan))

    def features_time_s(self, features: StepFeatures) -> float:
        """Return how long a step with these features takes, in seconds."""
        seconds = self._step.seconds(features) + self._turn_s + self._turn_sequence_s * features.num_sequences
        return seconds * self._factor("prompt" if features.num_prompts else "decode")

    def speed(self, replica: int = 0) -> MachineSpeed | None:
        """Return how slow the machine of one replica is over time, for its executor; ``None`` for a steady one.

        Replicas have machines of their own, each with its own components.
        """
        return DriftingSpeed(self._components, Random(f"pace/{self._seed}/{replica}")) if self._components else None

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return how long a load takes on an idle link, in seconds."""
        tier = load.tier.value
        cost = self._loads[tier]
        num_bytes = load.version.disk_bytes if tier == "host" else load.version.host_bytes
        return (cost.fixed_s + cost.byte_s * num_bytes) * self._factor(tier)

    def _factor(self, kind: str) -> float:
        noise: Noise | None = self._noise.get(kind)
        if noise is None:
            return 1.0
        if self._rng is None:
            return noise.mean
        at = self._rng.random() * (len(noise.quantiles) - 1)
        below = int(at)
        low, high = noise.quantiles[below], noise.quantiles[min(below + 1, len(noise.quantiles) - 1)]
        return low + (at - below) * (high - low)
