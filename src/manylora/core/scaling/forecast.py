"""The rate of arrivals some time ahead: level and trend, with a margin learnt from past errors.

::

    rate   |        . x      x  forecast of an earlier look, compared with the rate that came
           |     . ^  |      ^  level + trend, by least squares; a look counts less the older it is
           |  . .     |
           +----------+---> time
                 horizon

The margin is a quantile of past errors, so that it covers the noise and the turns of this traffic. Errors are taken in
units of the root of the forecast: errors of counts grow with it, and a burst in a quiet night says little about noon.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["RateForecast"]

MOST_ERRORS, FEWEST_ERRORS = 120, 20
FIRST_ERROR = 0.5  # the margin in those units before enough forecasts have come due
LOOKS_BACK = 4.0  # looks older than this many memories have no weight left and are dropped


class RateForecast:
    """Predicts requests per second from the number of arrivals at each look.

    A look counts 1/e after ``memory_s``. The rate kept below forecast and margin in the share ``quantile`` of the past.
    The present rate is taken over ``recent_s``.
    """

    def __init__(self, *, memory_s: float, quantile: float, recent_s: float) -> None:
        self._memory_s = memory_s
        self._quantile = quantile
        self._recent_s = recent_s
        self._looks: deque[tuple[float, int]] = deque()  # time, arrivals until then
        self._made: deque[tuple[float, float]] = deque()  # time for which it was made, forecast
        self._errors: deque[float] = deque(maxlen=MOST_ERRORS)

    def look(self, now: float, num_arrivals: int) -> None:
        """Learn the number of arrivals since the start."""
        self._looks.append((now, num_arrivals))
        while len(self._looks) > 2 and self._looks[1][0] < now - LOOKS_BACK * self._memory_s:
            self._looks.popleft()
        while self._made and self._made[0][0] <= now:
            _, forecast = self._made.popleft()
            self._errors.append((self.rate - forecast) / self._unit(forecast))

    @property
    def rate(self) -> float:
        """The present rate, over the last ``recent_s``."""
        if len(self._looks) < 2:
            return 0.0
        now, num_arrivals = self._looks[-1]
        since, earlier = self._looks[0]
        for at, count in reversed(self._looks):
            since, earlier = at, count
            if at <= now - self._recent_s:
                break
        return (num_arrivals - earlier) / (now - since) if now > since else 0.0

    def ahead(self, horizon_s: float) -> float:
        """Return the upper end of the rate within a horizon, and remember the forecast, to learn from its error."""
        level, trend = self._fit()
        forecast = max(0.0, level + trend * horizon_s)
        if self._looks:
            self._made.append((self._looks[-1][0] + horizon_s, forecast))
        likely = max(level, forecast)
        return likely + self._error() * self._unit(likely)

    def _unit(self, rate: float) -> float:
        """Return the root of a rate, and of one request at least: one more or less is no error."""
        return math.sqrt(rate + 1.0 / self._recent_s)

    def _error(self) -> float:
        """Return the quantile of past errors, in units of the root."""
        if len(self._errors) < FEWEST_ERRORS:
            return FIRST_ERROR
        errors = sorted(self._errors)
        return max(0.0, errors[min(len(errors) - 1, int(self._quantile * len(errors)))])

    def _fit(self) -> tuple[float, float]:
        """Return the rate now and its change per second, by discounted least squares over the looks."""
        if len(self._looks) < 2:
            return 0.0, 0.0
        now = self._looks[-1][0]
        weights = times = squares = rates = products = 0.0
        before = self._looks[0]
        for look in list(self._looks)[1:]:
            span = look[0] - before[0]
            at = (look[0] + before[0]) / 2 - now
            rate = (look[1] - before[1]) / span if span > 0 else 0.0
            weight = span * math.exp(at / self._memory_s)
            weights += weight
            times += weight * at
            squares += weight * at * at
            rates += weight * rate
            products += weight * at * rate
            before = look
        if weights <= 0:
            return 0.0, 0.0
        spread = squares - times * times / weights
        # A slope over less than a memory would be noise.
        is_long = now - self._looks[0][0] >= self._memory_s
        trend = (products - times * rates / weights) / spread if is_long and spread > 0 else 0.0
        return max(0.0, (rates - trend * times) / weights), trend
