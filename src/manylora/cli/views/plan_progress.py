"""The progress of `manylora plan`: a status line on a terminal, a line now and then elsewhere.

The number of runs is an estimate: a search that begins far from the capacity takes more of them. Late runs are near the
capacity and therefore longer than the first, so the time left is estimated from the mean of the runs so far.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["PlanProgress"]

SILENCE_S = 10.0
"""Time between two lines where there is no terminal."""


class PlanProgress:
    """Describes the runs of plans, one after another.

    Args:
        num_runs: Estimated runs of all plans together.
        write: Shows a line, in place of the one before it on a terminal.
        is_live: Whether lines replace each other.
        now: Returns a time in seconds that never steps back.
    """

    def __init__(self, num_runs: int, write: Callable[[str], None], *, is_live: bool, now: Callable[[], float]) -> None:
        self._num_runs = num_runs
        self._write = write
        self._is_live = is_live
        self._now = now
        self._began_at = self._written_at = now()
        self._num_begun = 0
        write(f"about {num_runs} runs of the simulator; the first ones tell how long they take")

    def begin_run(self, text: str) -> None:
        """Begin a run, with its description."""
        now = self._now()
        num_done, self._num_begun = self._num_begun, self._num_begun + 1
        if not self._is_live and now - self._written_at < SILENCE_S:
            return
        self._written_at = now
        left = ""
        if num_done:
            num_left = max(1, self._num_runs - num_done)
            left = f", about {_span(num_left * (now - self._began_at) / num_done)} left"
        self._write(f"run {self._num_begun} of about {max(self._num_runs, self._num_begun)}{left}: {text}")


def _span(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"
