"""The speed of a machine over time: it drifts with other tenants, clocks and heat.

Draws that know nothing of each other even out over ten steps; a machine that is a fifth slower for ten seconds is not
evened out by anything, and the requests of those seconds wait for each other. So what a profile holds of them is drawn
with a memory: the logarithm of a step's time wanders about its mean as a sum of Ornstein-Uhlenbeck processes, each of
one size and one length.

Source: Uhlenbeck and Ornstein, *On the theory of the Brownian motion* (1930): the stationary process whose
autocovariance falls off exponentially. Told the time, it is drawn exactly, however uneven the steps are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Protocol

from manylora.costs.profile import DriftComponent

__all__ = ["DriftingSpeed", "MachineSpeed"]


class MachineSpeed(Protocol):
    """Says how slow the machine is; asked once per step, in order of time."""

    def factor(self, now: float) -> float:
        """Return how many times as long as on the mean a step takes that begins now."""
        ...


class DriftingSpeed:
    """A machine that is slower and faster in components.

    The mean over *time* of the speed, one over the factor, is 1: over a long while as many steps are done as if the
    machine were steady.

    Args:
        components: Their sizes and lengths.
        rng: Draws them.
    """

    def __init__(self, components: Sequence[DriftComponent], rng: Random) -> None:
        self._components = tuple(components)
        self._rng = rng
        self._states = [rng.gauss(0.0, 1.0) for _ in components]  # each in units of its size
        self._mean = sum(one.size**2 for one in components) / 2
        self._now: float | None = None
        self._factor = 1.0

    def factor(self, now: float) -> float:
        """Return how many times as long as on the mean a step takes that begins now; twice the same if asked twice."""
        if now != self._now:
            self._wander(0.0 if self._now is None else now - self._now)
            self._now = now
            logarithm = sum(one.size * state for one, state in zip(self._components, self._states, strict=True))
            self._factor = math.exp(logarithm + self._mean)
        return self._factor

    def _wander(self, elapsed_s: float) -> None:
        assert elapsed_s >= 0, f"The speed is asked in order of time; got {elapsed_s = }"
        for index, spell in enumerate(self._components):
            kept = math.exp(-elapsed_s / spell.length_s)
            drawn = self._rng.gauss(0.0, math.sqrt(1.0 - kept * kept))
            self._states[index] = kept * self._states[index] + drawn
