"""A forecast of the adapters that the next seconds will name, from their recent traffic.

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

import numpy as np
import numpy.typing as npt

from manylora.core.types import AdapterKey

__all__ = ["Traffic"]

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
