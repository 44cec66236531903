"""Seconds to bring an item back, measured on copies, reads and steps.

Each is a straight line, a constant and so much per byte (or token), fitted by least squares over the recent past. The
constant matters: it is why a small adapter costs more per byte than a large one.
"""

from __future__ import annotations

from manylora.memory.eviction.policy import IdleItem

__all__ = ["LinearCost", "ReloadCosts"]

FADE = 0.995
"""Weight an observation keeps with every later one: a memory of about 200 of them."""

GUESS = 0.05
"""Weight of each of the two points the guess is made of: enough to settle what observations leave open."""


class LinearCost:
    """A line through noisy points, older ones fading, that starts from a guess.

    Args:
        fixed_s: Guess of the constant, in seconds.
        per_unit_s: Guess of the slope, in seconds per byte or token.
        typical: An amount that is usual: the guess counts as two faint observations, at 0 and at this amount.
    """

    def __init__(self, fixed_s: float, per_unit_s: float, typical: float) -> None:
        self._scale = typical  # amounts are kept in this unit, for the sums' sake
        self._guess = (fixed_s, per_unit_s * typical)
        self._n = self._x = self._xx = self._t = self._xt = 0.0
        self._line = self._guess

    def observe(self, amount: float, seconds: float) -> None:
        """Learn that ``amount`` took ``seconds``."""
        x = amount / self._scale
        self._n = self._n * FADE + 1.0
        self._x = self._x * FADE + x
        self._xx = self._xx * FADE + x * x
        self._t = self._t * FADE + seconds
        self._xt = self._xt * FADE + x * seconds
        self._line = self._fit()

    def seconds(self, amount: float) -> float:
        """Return what ``amount`` would take."""
        return self._line[0] + self._line[1] * amount / self._scale

    def marginal_s(self, amount: float) -> float:
        """Return what ``amount`` more would add to something that is done anyway."""
        return self._line[1] * amount / self._scale

    def _fit(self) -> tuple[float, float]:
        """Fit the observations and the guess, taken as the points ``x = 0`` and ``x = 1``; nothing is below 0."""
        fixed, slope = self._guess
        n, x, xx = self._n + 2 * GUESS, self._x + GUESS, self._xx + GUESS
        t, xt = self._t + GUESS * (2 * fixed + slope), self._xt + GUESS * (fixed + slope)
        per_unit = (n * xt - x * t) / (n * xx - x * x)
        if per_unit <= 0.0:
            return t / n, 0.0
        constant = (t - per_unit * x) / n
        return (constant, per_unit) if constant >= 0.0 else (0.0, xt / xx)


class ReloadCosts:
    """Seconds to bring adapters and prefix blocks back.

    Guesses, until there are measurements: a PCIe 4 link, an NVMe disk, an 8B model on a data-centre GPU.
    """

    def __init__(self) -> None:
        self.copy = LinearCost(0.0005, 1 / 16e9, 64e6)
        self.read = LinearCost(0.005, 1 / 2e9, 64e6)
        self.step = LinearCost(0.02, 0.0001, 512.0)

    def reload_s(self, item: IdleItem) -> float:
        """Return the seconds that bringing an item back takes, queueing left out.

        A block is recomputed within a step that happens anyway: its cost is its addition to the step.
        """
        if isinstance(item.key, int):
            return self.step.marginal_s(item.run_tokens)
        return self.copy.seconds(item.copy_bytes) + (self.read.seconds(item.read_bytes) if item.read_bytes else 0.0)
