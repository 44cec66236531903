"""The one statistic of comparisons by time: the ratio of each round, its median, and an interval by bootstrap.

A ratio is taken within a round, in which the sides take turns (`manylora.lab.bench.rounds`); over the rounds it has a
median. The interval is of the median under resampling of rounds: it says how far this run of the benchmark is to be
trusted, not how machines differ. Ratios of medians, means and best-of times are not used anywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
COVERED = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over the rounds, taken within each."""

    median: float  # median of the rounds
    low: float  # lower end of the interval for the median
    high: float  # upper end
    rounds: tuple[float, ...]  # the ratio of each round

    def verdict(self, most: float) -> str:
        """Return whether a goal of at most ``most`` is met or missed by the whole interval, else ``open``."""
        return "met" if self.high <= most else "missed" if self.low > most else "open"

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_by_round(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the ratio of two series of the same rounds, with a 95 % interval of its median."""
    ratios = [one / other for one, other in zip(numerators, denominators, strict=True)]
    return Ratio(*median_interval(ratios), tuple(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of rounds, and both ends of its 95 % interval.

    The resampling is seeded, so that a table can be made again from its figures.
    """
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = 100 * (1 - COVERED) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return statistics.median(values), float(low), float(high)
