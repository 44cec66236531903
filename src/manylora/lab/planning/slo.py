"""The service-level objective: latency limits and the percentile of requests that must meet them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.measure import RequestRecord, Slo, gaps_of

__all__ = ["Objective", "pool_values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Limits that a share of all requests (of all gaps, for the time between tokens) must keep.

    Args:
        slo: The limits; at least one is set.
        percentile: Percentage that must keep them.
    """

    slo: Slo = field(default_factory=Slo)
    percentile: float = 99.0

    def __post_init__(self) -> None:
        require(0 < self.percentile < 100, "percentile", self.percentile, "a number between 0 and 100")
        if not dict(self.limits()):
            raise ConfigError("No objective to plan for: give a limit on ttft_s, tbt_s, tpot_s or e2e_s")

    def limits(self) -> Iterator[tuple[str, float]]:
        """Yield each metric that has a limit (``ttft``, ``tbt``, ``tpot``, ``e2e``), and the limit in seconds."""
        for name in ("ttft", "tbt", "tpot", "e2e"):
            limit = getattr(self.slo, f"{name}_s")
            if limit is not None:
                yield name, limit

    @property
    def longest_s(self) -> float:
        """The longest of the limits, in seconds."""
        return max(limit for _, limit in self.limits())

    def measure(self, records: Sequence[RequestRecord]) -> dict[str, float]:
        """Return the percentile of every limited metric, in seconds; infinite where too many requests failed."""
        return {name: _percentile(pool_values(name, records), self.percentile) for name, _ in self.limits()}

    def is_kept(self, measured: dict[str, float]) -> bool:
        """Whether measured percentiles are within their limits."""
        return all(measured[name] <= limit for name, limit in self.limits())

    def broken(self, measured: dict[str, float]) -> tuple[str, ...]:
        """Return the names of the metrics beyond their limits, the worst first."""
        excess = {name: measured[name] / limit for name, limit in self.limits() if measured[name] > limit}
        return tuple(sorted(excess, key=lambda name: -excess[name]))

    def tightest(self, measured: dict[str, float]) -> str:
        """Return the name of the metric that is nearest to its limit, or furthest beyond it."""
        return max(self.limits(), key=lambda limit: measured[limit[0]] / limit[1])[0]


def pool_values(name: str, records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    """Return a metric over requests (over gaps, for ``tbt``) in seconds; a failed request counts as infinite."""
    failed = sum(record.error is not None for record in records)
    good = [record for record in records if record.error is None]
    if name == "tbt":
        values = gaps_of(good)
    else:
        times = (getattr(record, f"{name}_s") for record in good)
        values = np.fromiter((time for time in times if time is not None), dtype=np.float64)
    return np.concatenate([values, np.full(failed, math.inf)])


def _percentile(values: NDArray[np.float64], percentile: float) -> float:
    if not len(values):
        return 0.0
    # The value itself, not an interpolation: between a number and infinity there is none.
    return float(np.quantile(values, percentile / 100, method="higher"))
