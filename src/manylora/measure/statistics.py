"""Percentiles, and how far to trust them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interval", "Percentiles", "block_bootstrap", "interval_of_runs", "percentiles"]

SHARES = (0.5, 0.9, 0.99)

# Two-sided 95 % points of Student's t by degrees of freedom, 1 to 30: runs are few, and scipy is an extra.
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """A distribution in five numbers, in the unit of its values.

    Args:
        count: Values.
        mean: Their mean.
        p50: The median; percentiles are interpolated linearly.
        p90: Nine of ten are below.
        p99: All but one of a hundred are below.
        highest: The greatest.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the range that holds the truth in 19 of 20 cases."""

    middle: float
    low: float
    high: float


def percentiles(values: Iterable[float] | NDArray[np.float64]) -> Percentiles | None:
    """Return the percentiles of some values, ``None`` if there are none."""
    found = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)
    if not len(found):
        return None
    p50, p90, p99 = (float(value) for value in np.quantile(found, SHARES))
    return Percentiles(
        count=len(found), mean=float(found.mean()), p50=p50, p90=p90, p99=p99, highest=float(found.max())
    )


def interval_of_runs(values: Seq[float]) -> Interval:
    """Return the mean of a figure over repeated runs, each with its own seed, with Student's interval.

    One run tells nothing of its own spread: its interval is infinite.
    """
    assert values
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(middle=mean, low=-np.inf, high=np.inf)
    t = STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1]
    half = t * float(np.std(values, ddof=1)) / sqrt(len(values))
    return Interval(middle=mean, low=mean - half, high=mean + half)


def block_bootstrap(
    values: Seq[float],
    statistic: Callable[[NDArray[np.float64]], float],
    rng: np.random.Generator,
    *,
    num_blocks: int = 20,
    num_draws: int = 400,
) -> Interval:
    """Return a figure of one run with a 95 % interval, from the run alone.

    Requests that meet in a queue are late together, so they are drawn in blocks that followed each other: single draws
    would make the interval far too narrow. It is a rough guide even so; repeated runs (``interval_of_runs``) are
    better.

    Args:
        values: In order of time.
        statistic: The figure.
        rng: Chance.
        num_blocks: Blocks that the run is cut into, and drawn each time.
        num_draws: Draws.
    """
    assert len(values)
    found = np.asarray(values, dtype=np.float64)
    size = max(1, len(found) // num_blocks)
    starts = rng.integers(0, len(found) - size + 1, size=(num_draws, -(-len(found) // size)))
    offsets = np.arange(size)
    draws = [statistic(found[(row[:, None] + offsets).ravel()[: len(found)]]) for row in starts]
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(middle=statistic(found), low=float(low), high=float(high))
