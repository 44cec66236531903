"""The speed of a machine over time: it drifts with other tenants, clocks and heat.

Independent noise averages out over ten steps. A machine that is a fifth slower for ten seconds delays all requests of
those seconds. Drift is therefore correlated in time: the logarithm of a step's duration is a sum of Ornstein-Uhlenbeck
processes, each of one size and one length.

Source: Uhlenbeck and Ornstein, *On the theory of the Brownian motion* (1930): the stationary process with an
exponentially decaying autocovariance. It is sampled exactly at any times, however uneven the steps are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Protocol

from manylora.lab.costs.profile import DriftComponent

__all__ = ["DriftingSpeed", "MachineSpeed"]


class MachineSpeed(Protocol):
    """The slowdown of a machine; read once per step, in order of time."""

    def factor(self, now: float) -> float:
        """Return the factor on the mean duration of a step that begins now."""
        ...


class DriftingSpeed:
    """A machine whose speed is a product of drift components, drawn from ``rng``.

    The mean over *time* of the speed, one over the factor, is 1: in the long run the machine executes as many steps as
    a steady one.
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
