"""Histograms that take many values at once, for the event loop's thread alone.

Every token has its gap to the one before, and those that came in one step often have the same: counting equal values
together costs a tenth of telling prometheus-client of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["BatchHistogram", "LogHistogram"]

RATIO = 1.04
"""Each bucket's upper edge over its lower one; a bucket's middle is at most 2 % from the values in it."""

LEAST_S = 1e-6
_PER_LOG = 1.0 / math.log(RATIO)


class BatchHistogram(Collector):
    """A Prometheus histogram with fixed labels.

    Args:
        name: Of the metric.
        text: Its description.
        labels: Its labels, by name.
        registry: Shows it.
        buckets: Upper edges, ascending, without infinity.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._edges = tuple(buckets)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0
        registry.register(self)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value ``count`` times."""
        self._counts[bisect_left(self._edges, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram; prometheus-client calls this."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        edges = [*map(str, map(float, self._edges)), "+Inf"]
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        yield family


class LogHistogram:
    """Durations in log-spaced buckets, in seconds: any number of them in little memory, percentiles within 2 %.

    Only buckets that were hit take memory, so a histogram costs no more than the values it holds and never more than
    the few hundred buckets between a microsecond and an hour.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, value_s: float, count: int = 1) -> None:
        """Count a duration ``count`` times; one shorter than a microsecond counts as that."""
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
