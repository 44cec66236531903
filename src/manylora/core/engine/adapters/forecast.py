"""A forecast of the next request of each adapter, from a histogram of the gaps between its requests.

A gap that recurs (a job every five minutes, a user who reads an answer for half a minute) makes the next request
predictable. After each request the adapter is *due* from just before the shortest usual gap until just after the
longest:

::

    request                       due                                          time -->
       |-------------------|==================|
                       0.9 * 5th          1.1 * 99th percentile of its gaps

Adapters with few gaps, or gaps of all lengths, are not predictable and never due.

Source: Shahrad et al., "Serverless in the Wild" (ATC '20), section 4, which Chameleon cites (section 4.2,
"Prefetching"). Bins there are minutes up to four hours; here they are half octaves from a millisecond on, for chats
and for nightly jobs. Its time-series fallback for rare items is left out: a rare adapter is rarely loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

from manylora.core.types import AdapterKey

__all__ = ["Forecast"]

NUM_BINS = 64  # half octaves: from 1 ms to 2**32 ms, 50 days
MIN_GAPS = 8
MIN_VARIATION = 2.0
"""Least coefficient of variation of the bin counts: below it, gaps are spread too evenly to predict the next."""
HEAD, TAIL = 0.05, 0.99
MARGIN = 0.1


@dataclass(slots=True)
class _Gaps:
    last_at: float
    num_gaps: int = 0
    bins: dict[int, int] = field(default_factory=dict)
    closes_at: float = -math.inf


class Forecast:
    """Learns gaps and names the adapters that are due. ``now`` is in seconds."""

    def __init__(self) -> None:
        self._gaps: dict[AdapterKey, _Gaps] = {}
        self._opening: list[tuple[float, AdapterKey, float]] = []  # opens at, key, request it follows
        self._due: dict[AdapterKey, None] = {}

    def used(self, key: AdapterKey, now: float) -> None:
        """Learn that a request for ``key`` arrived."""
        gaps = self._gaps.get(key)
        if gaps is None:
            self._gaps[key] = _Gaps(now)
            return
        gap = now - gaps.last_at
        index = min(max(math.floor(2.0 * math.log2(gap * 1000.0)), 0), NUM_BINS - 1) if gap > 0.001 else 0
        gaps.bins[index] = gaps.bins.get(index, 0) + 1
        gaps.num_gaps += 1
        gaps.last_at = now
        self._due.pop(key, None)
        if _is_predictable(gaps):
            gaps.closes_at = now + _edge(_percentile_bin(gaps, TAIL) + 1) * (1 + MARGIN)
            heappush(self._opening, (now + _edge(_percentile_bin(gaps, HEAD)) * (1 - MARGIN), key, now))

    def due(self, now: float) -> list[tuple[AdapterKey, float]]:
        """Return the adapters whose next request is due, each with the time in seconds until which it is."""
        while self._opening and self._opening[0][0] <= now:
            _, key, followed = heappop(self._opening)
            if key in self._gaps and self._gaps[key].last_at == followed:
                self._due[key] = None
        for key in [key for key in self._due if self._gaps[key].closes_at <= now]:
            del self._due[key]
        return [(key, self._gaps[key].closes_at) for key in self._due]

    def forget(self, key: AdapterKey) -> None:
        """Forget the gaps of an adapter."""
        self._gaps.pop(key, None)
        self._due.pop(key, None)


def _edge(index: int) -> float:
    """Return the lower edge of a bin, in seconds."""
    return math.ldexp(0.001, index // 2) * (math.sqrt(2.0) if index % 2 else 1.0)


def _is_predictable(gaps: _Gaps) -> bool:
    if gaps.num_gaps < MIN_GAPS:
        return False
    mean = gaps.num_gaps / NUM_BINS
    variance = sum(count * count for count in gaps.bins.values()) / NUM_BINS - mean * mean
    return variance >= (MIN_VARIATION * mean) ** 2


def _percentile_bin(gaps: _Gaps, share: float) -> int:
    """Return the first bin with at least ``share`` of the gaps in it and below."""
    below = 0
    for index in sorted(gaps.bins):
        below += gaps.bins[index]
        if below >= share * gaps.num_gaps:
            return index
    raise AssertionError("there are gaps")
