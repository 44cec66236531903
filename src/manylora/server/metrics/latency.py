"""Latency of the last minute, in all and by adapter, for people who look now.

Prometheus keeps histograms since the start and leaves windows to the system that scrapes; a person at a terminal has
no such helper. So the API process keeps the last minute itself, in slices that are dropped whole as they age::

    now - 60 s                                   now
    | slice | slice | slice | ...       | slice |
      dropped next                        filled now

Memory is bounded: histograms by their buckets, adapters by ``MAX_ADAPTERS`` a slice (those beyond it
still count in the totals).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from manylora.hosting.protocol import Observations
from manylora.server.metrics.histograms import LogHistogram
from manylora.server.metrics.status_report import Latency, Percentiles

__all__ = ["LatencyWindow"]

WINDOW_S = 60.0
NUM_SLICES = 12
MAX_ADAPTERS = 2048

SHARES = (0.5, 0.9, 0.99)


class _Durations:
    """What ``Latency`` is made from; created as they come."""

    __slots__ = ("e2e_s", "inter_token_s", "queue_s", "ttft_s")

    def __init__(self) -> None:
        self.ttft_s = LogHistogram()
        self.inter_token_s = LogHistogram()
        self.e2e_s = LogHistogram()
        self.queue_s = LogHistogram()


@dataclass(slots=True)
class _Slice:
    number: int
    total: _Durations = field(default_factory=_Durations)
    by_adapter: dict[str, _Durations] = field(default_factory=dict)


class LatencyWindow:
    """The observations of the last minute. Told the time, in seconds from an origin that never moves."""

    window_s = WINDOW_S

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque()

    def observe(self, observed: Observations, now: float) -> None:
        """Take an engine's observations since its last message; O(1) per token."""
        current = self._current(now)
        for waited_s in observed.queue_s:
            current.total.queue_s.add(waited_s)
        for name, values in observed.ttft_s.items():
            for durations in _places(current, name):
                for value in values:
                    durations.ttft_s.add(value)
        for value, count in Counter(chain.from_iterable(observed.inter_token_s.values())).items():
            current.total.inter_token_s.add(value, count)  # those of one step are mostly equal
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
        """Return the latency of one adapter's requests; those of the base have no name."""
        self._expire(now)
        return _summary(one.by_adapter[name] for one in self._slices if name in one.by_adapter)

    def _current(self, now: float) -> _Slice:
        self._expire(now)
        number = _number(now)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def _expire(self, now: float) -> None:
        oldest = _number(now) - NUM_SLICES + 1
        while self._slices and self._slices[0].number < oldest:
            self._slices.popleft()


def _number(now: float) -> int:
    return int(now * NUM_SLICES / WINDOW_S)


def _places(current: _Slice, name: str) -> tuple[_Durations, ...]:
    """Return where durations of an adapter are counted."""
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

    return Latency(
        ttft_s=percentiles(part.ttft_s for part in parts),
        inter_token_s=percentiles(part.inter_token_s for part in parts),
        e2e_s=percentiles(part.e2e_s for part in parts),
        queue_s=percentiles(part.queue_s for part in parts),
    )
