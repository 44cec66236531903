"""The rate of a function's requests, told the time: an average in which old requests fade."""

from __future__ import annotations

from math import exp

__all__ = ["RequestRate"]


class RequestRate:
    """Requests per second.

    Args:
        window_s: Seconds after which a request counts by 1/e.
    """

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._at = 0.0
        self._count = 0.0

    def note(self, now: float, num_requests: int = 1) -> None:
        """Count requests."""
        self._count = self._faded(now) + num_requests
        self._at = now

    def per_s(self, now: float) -> float:
        """Return the rate; less than a request in ten windows is none."""
        rate = self._faded(now) / self._window_s
        return rate if rate * self._window_s > 1e-4 else 0.0

    def _faded(self, now: float) -> float:
        return self._count * exp(-max(0.0, now - self._at) / self._window_s)
