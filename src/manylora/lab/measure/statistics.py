"""Percentiles, and confidence intervals over repeated runs."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

__all__ = ["Estimate", "PercentileSummary", "interval_of_runs", "percentiles"]

SHARES = (0.5, 0.9, 0.99)

# Two-sided 95 % points of Student's t by degrees of freedom, 1 to 30: runs are few, and scipy is an extra.
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileSummary:
    """Mean, percentiles and maximum of a distribution, in the unit of its values.

    Args:
        count: Number of values.
        p50: The median; percentiles are interpolated linearly.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An estimate and its 95 % confidence interval."""

    middle: float
    low: float
    high: float


def percentiles(values: Iterable[float] | NDArray[np.float64]) -> PercentileSummary | None:
    """Return the percentiles of values, ``None`` if there are none."""
    found = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)
    if not len(found):
        return None
    p50, p90, p99 = (float(value) for value in np.quantile(found, SHARES))
    return PercentileSummary(
        count=len(found), mean=float(found.mean()), p50=p50, p90=p90, p99=p99, highest=float(found.max())
    )


def interval_of_runs(values: Seq[float]) -> Estimate:
    """Return the mean of a figure over repeated runs, each with its own seed, with Student's interval.

    The interval of a single run is infinite.
    """
    assert values
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(middle=mean, low=-np.inf, high=np.inf)
    t = STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1]
    half = t * float(np.std(values, ddof=1)) / sqrt(len(values))
    return Estimate(middle=mean, low=mean - half, high=mean + half)
