"""A bound on the time that the API process spends on the messages of one function, so that a flood delays no other.

Pure: told the time.
"""

from __future__ import annotations

__all__ = ["Allowance"]

WINDOW_S = 0.25
MOST_IDLE = 0.02
"""Most of a processor for the messages of a function without requests, which has next to nothing to say."""

MOST_BUSY = 0.25
"""Likewise with requests; an engine with sixteen of them on a small model needs a tenth."""

LONGEST_PAUSE_S = 5.0


class Allowance:
    """Counts processor time by windows, for a function with and without requests."""

    def __init__(self) -> None:
        self._began_at = float("-inf")
        self._spent_s = [0.0, 0.0]

    def spend(self, now: float, took_s: float, *, is_busy: bool) -> float:
        """Count the time of messages; return the seconds for which no further ones may be read.

        Args:
            now: Seconds, on any clock that never goes back.
            took_s: Processor time that the messages took.
            is_busy: Whether the function had requests when they came.
        """
        if now - self._began_at >= WINDOW_S:
            self._began_at = now
            self._spent_s = [0.0, 0.0]
        self._spent_s[is_busy] += took_s
        most = MOST_BUSY if is_busy else MOST_IDLE
        spent_s = self._spent_s[is_busy]
        if spent_s <= most * WINDOW_S:
            return 0.0
        return min(LONGEST_PAUSE_S, max(0.0, spent_s / most - (now - self._began_at)))
