"""The fitted cost model: durations of steps and loads as measured on a live engine."""

from __future__ import annotations

from random import Random

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.plan import AdapterLoad, StepPlan
from manylora.core.types import Tier
from manylora.lab.costs.profile import CostProfile, DriftComponent, Noise, StepCost
from manylora.lab.costs.speed import DriftingSpeed, MachineSpeed

__all__ = ["FittedCost"]


class FittedCost:
    """Prices work by a profile.

    Without ``rng`` a step has the mean duration of such steps: means are right, and tails too thin. With it, each step
    is longer or shorter by a factor drawn from the measured ones. If the profile has drift components, the executor
    applies them through ``speed`` (a cost model does not see the time), and only the noise without drift is drawn here.

    ``interference`` is for the executor too: the slowdown of a step by concurrent loads, by tier.

    Args:
        profile: The measurements.
        rng: Draws the noise; without it there is none.
        has_drift: Whether ``speed`` applies the profile's drift. If not, all noise is drawn here, step by step.
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
        """Return the duration of a step from turn to turn of the loop, in seconds."""
        return self.features_time_s(step_features(plan))

    def features_time_s(self, features: StepFeatures) -> float:
        """Return the duration of a step with these features, in seconds."""
        seconds = self._step.seconds(features) + self._turn_s + self._turn_sequence_s * features.num_sequences
        return seconds * self._factor("prompt" if features.num_prompts else "decode")

    def speed(self, replica: int = 0) -> MachineSpeed | None:
        """Return the drifting speed of a replica's machine, for its executor; ``None`` for a steady one.

        Replicas drift independently.
        """
        # The label is part of the seed: another one would draw other speeds.
        seed = b"pace/%d/%d" % (self._seed, replica)
        return DriftingSpeed(self._components, Random(seed)) if self._components else None

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return the duration of a load on an idle link, in seconds."""
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
