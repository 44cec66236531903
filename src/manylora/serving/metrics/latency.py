"""The recent past: latency of the last minute, in total and by adapter, and the last moves of adapters.

Prometheus keeps histograms since the start and leaves windows to the system that scrapes. For a person at a terminal
the API process keeps the last minute itself, in slices that are dropped whole as they age::

    now - 60 s                                   now
    | slice | slice | slice | ...       | slice |
      dropped next                        filled now

Memory is bounded: histograms by their buckets, adapters by ``MAX_ADAPTERS`` a slice (others count in the totals alone).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from manylora.serving.hosting.protocol import AdapterMove, Observations
from manylora.serving.metrics.status_report import Latency, Percentiles

__all__ = ["LatencyWindow", "LogHistogram", "TimedMove"]

WINDOW_S = 60.0
NUM_SLICES = 12
MAX_ADAPTERS = 2048

SHARES = (0.5, 0.9, 0.99)

RATIO = 1.04  # each bucket's upper edge over its lower one; a bucket's middle is at most 2 % from the values in it

LEAST_S = 1e-6
_PER_LOG = 1.0 / math.log(RATIO)


class TimedMove(NamedTuple):
    """A move of an adapter, and the time at which its message came, in seconds since the epoch."""

    at: float
    move: AdapterMove


@dataclass(slots=True)
class LogHistogram:
    """Durations in log-spaced buckets, in seconds: percentiles within 2 %, a few hundred buckets to an hour."""

    _counts: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, value_s: float, count: int = 1) -> None:
        """Count a duration ``count`` times; those below a microsecond count as a microsecond."""
        bucket = math.floor(math.log(max(value_s, LEAST_S)) * _PER_LOG)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def update(self, others: Iterable[LogHistogram]) -> None:
        """Add the counts of others."""
        for other in others:
            for bucket, count in other._counts.items():
                self._counts[bucket] = self._counts.get(bucket, 0) + count

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """Return quantiles by nearest rank, in seconds, or raise ``ValueError`` if it is empty.

        ``shares`` are in (0, 1], ascending.
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


@dataclass(slots=True)
class _Durations:
    """Histograms of the durations in ``Latency``."""

    ttft_s: LogHistogram = field(default_factory=LogHistogram)
    inter_token_s: LogHistogram = field(default_factory=LogHistogram)
    e2e_s: LogHistogram = field(default_factory=LogHistogram)
    queue_s: LogHistogram = field(default_factory=LogHistogram)


@dataclass(slots=True)
class _Slice:
    number: int
    total: _Durations = field(default_factory=_Durations)
    by_adapter: dict[str, _Durations] = field(default_factory=dict)


class LatencyWindow:
    """Latencies of the last minute, in all and by adapter; ``now`` is in seconds on a monotonic clock."""

    window_s = WINDOW_S

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque()

    def observe(self, observed: Observations, now: float) -> None:
        """Add an engine's observations since its last message; O(1) per token."""
        current = self._current(now)
        for waited_s in observed.queue_s:
            current.total.queue_s.add(waited_s)
        for name, values in observed.ttft_s.items():
            for durations in _places(current, name):
                for value in values:
                    durations.ttft_s.add(value)
        for value, count in Counter(chain.from_iterable(observed.inter_token_s.values())).items():
            current.total.inter_token_s.add(value, count)  # gaps within one step are mostly equal
        for name, values in observed.inter_token_s.items():
            for durations in _places(current, name)[1:]:
                for value, count in Counter(values).items() if len(values) > 1 else ((values[0], 1),):
                    durations.inter_token_s.add(value, count)
        for request in observed.finished:
            for durations in _places(current, request.adapter):
                durations.e2e_s.add(request.e2e_s)

    def total(self, now: float) -> Latency:
        """Return the latency of all requests."""
        self._expire(now)
        return _summary(one.total for one in self._slices)

    def of_adapter(self, name: str, now: float) -> Latency:
        """Return the latency of one adapter's requests; the base has the empty name."""
        self._expire(now)
        return _summary(one.by_adapter[name] for one in self._slices if name in one.by_adapter)

    def _current(self, now: float) -> _Slice:
        number = self._expire(now)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def _expire(self, now: float) -> int:
        """Drop slices that have left the window; return the number of the present slice."""
        number = int(now * NUM_SLICES / WINDOW_S)
        while self._slices and self._slices[0].number <= number - NUM_SLICES:
            self._slices.popleft()
        return number


def _places(current: _Slice, name: str) -> tuple[_Durations, ...]:
    """Return the histograms that durations of an adapter are added to."""
    own = current.by_adapter.get(name)
    if own is None:
        if len(current.by_adapter) >= MAX_ADAPTERS:
            return (current.total,)
        own = current.by_adapter[name] = _Durations()
    return current.total, own


def _summary(parts: Iterable[_Durations]) -> Latency:
    parts = list(parts)

    def percentiles(histograms: Iterable[LogHistogram]) -> Percentiles | None:
        merged = LogHistogram()
        merged.update(histograms)
        if not len(merged):
            return None
        p50, p90, p99 = merged.quantiles(SHARES)
        return Percentiles(count=len(merged), p50=p50, p90=p90, p99=p99)

    names = Latency.__struct_fields__
    return Latency(**{name: percentiles(getattr(part, name) for part in parts) for name in names})
