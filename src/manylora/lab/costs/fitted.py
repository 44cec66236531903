"""The fitted cost model: durations of steps and loads as measured on a live engine, and the speed of its machine.

The speed of a machine drifts with other tenants, clocks and heat. Independent noise averages out over ten steps, but a
machine that is a fifth slower for ten seconds delays all requests of those seconds. Drift is therefore correlated in
time: the logarithm of a step's duration is a sum of Ornstein-Uhlenbeck processes, each of one size and one length.

Source: Uhlenbeck and Ornstein, *On the theory of the Brownian motion* (1930): the stationary process with an
exponentially decaying autocovariance. It is sampled exactly at any times, however uneven the steps are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Protocol

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.plan import AdapterLoad, StepPlan
from manylora.core.types import Tier
from manylora.lab.costs.profile import CostProfile, DriftComponent, Noise, StepCost

__all__ = ["DriftingSpeed", "FittedCost", "MachineSpeed"]


class MachineSpeed(Protocol):
    """The slowdown of a machine; read once per step, in order of time."""

    def factor(self, now: float) -> float:
        """Return the factor on the mean duration of a step that begins now."""
        ...


class DriftingSpeed:
    """A machine whose speed is a product of drift components, drawn from ``rng``.

    ``factor`` multiplies the durations of steps, so the speed is its inverse. The mean of the speed over *time* is 1:
    in the long run the machine executes as many steps as a steady machine.
    """

    def __init__(self, components: Sequence[DriftComponent], rng: Random) -> None:
        self._components = tuple(components)
        self._rng = rng
        self._states = [rng.gauss(0.0, 1.0) for _ in components]  # each in units of its size
        self._mean = sum(one.size**2 for one in components) / 2
        self._now: float | None = None
        self._factor = 1.0

    def factor(self, now: float) -> float:
        """Return the factor on the mean duration of a step that begins now; the same for the same ``now``."""
        if now != self._now:
            self._advance(0.0 if self._now is None else now - self._now)
            self._now = now
            logarithm = sum(one.size * state for one, state in zip(self._components, self._states, strict=True))
            self._factor = math.exp(logarithm + self._mean)
        return self._factor

    def _advance(self, elapsed_s: float) -> None:
        assert elapsed_s >= 0, f"The speed is read in order of time; got {elapsed_s = }"
        for index, component in enumerate(self._components):
            kept = math.exp(-elapsed_s / component.length_s)
            drawn = self._rng.gauss(0.0, math.sqrt(1.0 - kept * kept))
            self._states[index] = kept * self._states[index] + drawn


class FittedCost:
    """Prices work by a profile.

    Without ``rng`` a step has the mean duration of such steps: means are right, and tails too thin. With it, each step
    is longer or shorter by a factor drawn from the measured ones. If the profile has drift components, the executor
    applies them through ``speed`` (a cost model does not see the time), and only the noise without drift is drawn here.

    ``interference`` is for the executor too: the slowdown of a step by concurrent loads, by tier.

    Args:
        profile: The measurements. Without their ``speed_drift``, all noise is drawn here, step by step.
        rng: Draws the noise; without it there is none.
    """

    def __init__(self, profile: CostProfile, rng: Random | None = None) -> None:
        self._step = StepCost(profile.terms, profile.rows)
        self._turn_s, self._turn_sequence_s = profile.turn_s, profile.turn_sequence_s
        self._loads = profile.loads
        self._noise = profile.noise
        self._rng = rng
        self._components: tuple[DriftComponent, ...] = ()
        self._seed = 0
        if rng is not None and profile.speed_drift is not None:
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
