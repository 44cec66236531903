"""Histograms that count equal values together, and the edges of their buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["FIRST_TOKEN_S", "LOAD_S", "NUM_CHOICES", "REQUEST_S", "TOKENS", "TOKEN_S", "BatchHistogram"]

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
NUM_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class BatchHistogram(Collector):
    """A Prometheus histogram with fixed labels that adds many equal values at once.

    Every token has its gap to the one before, and gaps of one step are often equal: counting equal values together
    costs a tenth of one ``Histogram.observe`` for each.

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
