"""Durations in log-spaced buckets: any number of them in little memory, percentiles within 2 %.

Only buckets that were hit take memory, so a histogram costs no more than the values it holds and never more than the
few hundred buckets between a microsecond and an hour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["LogHistogram"]

RATIO = 1.04
"""Each bucket's upper edge over its lower one; a bucket's middle is at most 2 % from what fell into it."""

LEAST_S = 1e-6
_PER_LOG = 1.0 / math.log(RATIO)


class LogHistogram:
    """Counts of durations, in seconds."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, value_s: float, count: int = 1) -> None:
        """Count a duration ``count`` times; what is shorter than a microsecond counts as one."""
        bucket = math.floor(math.log(max(value_s, LEAST_S)) * _PER_LOG)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def update(self, others: Iterable[LogHistogram]) -> None:
        """Count everything that others hold as well."""
        for other in others:
            for bucket, count in other._counts.items():
                self._counts[bucket] = self._counts.get(bucket, 0) + count

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """Return for each share the duration that it lies at or below, by nearest rank, in seconds.

        Args:
            shares: In (0, 1], ascending.

        Raises:
            ValueError: There is nothing in it.
        """
        num_values = len(self)
        if not num_values:
            raise ValueError("An empty histogram has no quantiles")
        found = []
        buckets = iter(sorted(self._counts))
        bucket, num_below = 0, 0
        for share in shares:
            while num_below < math.ceil(share * num_values):
                bucket = next(buckets)
                num_below += self._counts[bucket]
            found.append(RATIO ** (bucket + 0.5))
        return found
