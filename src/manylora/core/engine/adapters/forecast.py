"""Forecasts of adapters that will be asked for: from the gaps between their requests, or from their recent traffic.

*Gaps:* the next request of each adapter, from a histogram of the gaps between its requests.

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

*Traffic:* the adapters that the next seconds will name.

::

    requests of an adapter   | 0 | 2 | 1 | 4 |  now  |     INTERVAL_S each; WINDOW of them
                              features: log(1 + count)      probability that it is asked for in this one

One logistic regression over all adapters, trained online: when an interval ends, each adapter is an example of what was
known at its beginning. A coefficient per past interval lets recent and older traffic count as they prove to; one of the
adapter's rate so far tells a busy adapter that paused from a rare one. An adapter whose probability reaches
``THRESHOLD`` is *due*.

Source: Predictive-LoRA (arXiv 2512.20210) forecasts the probability of each adapter from its counts in a sliding
window of intervals, by two LSTM layers trained with cross-entropy, and copies the hot ones to the device beforehand.
The same inputs, output and loss are here without the recurrent layers, whose training needs more than the core may
import; interval, window and threshold are ours, since they are not in the parts of the publication at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from manylora.core.types import AdapterKey

__all__ = ["Forecast", "Traffic"]

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


INTERVAL_S = 5.0
WINDOW = 12
THRESHOLD = 0.5
RATE_FADE = 0.995  # of an adapter's rate from one interval to the next
STEP, DECAY, TINY = 0.1, (0.9, 0.999), 1e-8  # Adam's


class Traffic:
    """Counts requests per interval and names the adapters that are due. ``now`` is in seconds."""

    def __init__(self) -> None:
        self._rows: dict[AdapterKey, int] = {}
        self._keys: list[AdapterKey | None] = []  # by row
        self._free: list[int] = []  # rows of adapters that were forgotten
        self._recent = np.zeros((0, WINDOW + 1))  # counts, the oldest interval first, this one last
        self._rate = np.zeros(0)  # requests per interval, faded
        self._probability = np.zeros(0)  # of each adapter in this interval
        self._weights = np.zeros(WINDOW + 2)
        self._weights[-1] = -2.0  # rare until something is known
        self._moments = np.zeros((2, WINDOW + 2))
        self._num_steps = 0
        self._interval = -1  # number of this one
        self._due: list[tuple[AdapterKey, float]] = []  # with seconds in which one request is expected

    def used(self, key: AdapterKey, now: float) -> None:
        """Count a request."""
        self._advance(now)
        row = self._rows.get(key)
        if row is None:
            if not self._free:
                self._free.append(len(self._keys))
                self._keys.append(None)
            row = self._rows[key] = self._free.pop()
            self._keys[row] = key
            if row == len(self._rate):  # twice the room
                more = max(16, row)
                self._recent = np.concatenate([self._recent, np.zeros((more, WINDOW + 1))])
                self._rate, self._probability = (np.pad(one, (0, more)) for one in (self._rate, self._probability))
        self._recent[row, -1] += 1

    def due(self, now: float) -> list[tuple[AdapterKey, float]]:
        """Return the adapters that are due, the likeliest first, each with the time until one request is expected."""
        self._advance(now)
        return [(key, now + span_s) for key, span_s in self._due]

    def forget(self, key: AdapterKey) -> None:
        """Forget the traffic of an adapter; its row stays, without requests, for the next new one."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._keys[row] = None
            self._free.append(row)
            self._recent[row], self._rate[row] = 0.0, 0.0
        self._due = [one for one in self._due if one[0] != key]

    def _advance(self, now: float) -> None:
        interval = math.floor(now / INTERVAL_S)
        if interval == self._interval:
            return
        # After a silence longer than the window nothing more changes.
        for _ in range(min(interval - self._interval, WINDOW + 2) if self._interval >= 0 else 0):
            self._learn(self._recent[:, -1] > 0)
            self._rate = RATE_FADE * self._rate + (1 - RATE_FADE) * self._recent[:, -1]
            self._recent = np.roll(self._recent, -1, axis=1)
            self._recent[:, -1] = 0.0
        self._interval = interval
        self._probability = _sigmoid(self._features() @ self._weights)
        hot = [int(row) for row in np.flatnonzero(self._probability >= THRESHOLD) if row < len(self._keys)]
        found = [(self._keys[row], -INTERVAL_S / math.log1p(-min(0.999, self._probability[row]))) for row in hot]
        self._due = sorted(((key, span_s) for key, span_s in found if key is not None), key=lambda one: one[1])

    def _features(self) -> npt.NDArray[np.float64]:
        """Return a row of inputs for each adapter."""
        rate = np.log1p(self._rate * 100.0)[:, None]
        return np.concatenate([np.log1p(self._recent[:, :-1]), rate, np.ones_like(rate)], axis=1)

    def _learn(self, came: npt.NDArray[np.bool_]) -> None:
        """Move the weights against the gradient of the mean cross-entropy, by Adam."""
        num = len(self._keys)
        if not num:
            return
        features = self._features()[:num]
        gradient = features.T @ (_sigmoid(features @ self._weights) - came[:num]) / num
        self._num_steps += 1
        for moment, decay, power in zip(self._moments, DECAY, (1, 2), strict=True):
            moment += (1 - decay) * (gradient**power - moment)
        mean, square = (one / (1 - decay**self._num_steps) for one, decay in zip(self._moments, DECAY, strict=True))
        self._weights -= STEP * mean / (np.sqrt(square) + TINY)


def _sigmoid(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-values))
