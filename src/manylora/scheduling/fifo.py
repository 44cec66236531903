"""First come, first served, except that a cold or capped request does not hold up those behind it.

A sequence whose adapter is on its way is passed by younger ones: it could not run anyway. One that lacks room
for its adapter, or that the adapter cap keeps out, may be passed as well, but by no more than
``MAX_BYPASS`` admissions: after that nobody passes, running sequences end, and it gets its turn. One that
lacks room for KV is never passed.

Source: vLLM and S-LoRA admit first come first served; the bound on bypassing is ours (at their adapter limit
a request can starve).
"""

from __future__ import annotations

from itertools import islice

from manylora.scheduling.policy import Outcome
from manylora.scheduling.sequence import Sequence

__all__ = ["FifoPolicy"]

MAX_BYPASS = 64
LOOK_AHEAD = 256
"""Sequences offered in one step at most: bounds the cost of a step when thousands wait."""


class FifoPolicy:
    """Offers sequences by order of arrival; a pre-empted one keeps its place."""

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}
        self._is_sorted = True
        self._offers: list[Sequence] = []
        self._first: Sequence | None = None
        self._passed: list[Sequence] = []
        self._is_blocked = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        """Take in a sequence; its place is by ``seq_id``."""
        if self._waiting and self._is_sorted:
            self._is_sorted = sequence.seq_id > next(reversed(self._waiting))
        self._waiting[sequence.seq_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        del self._waiting[sequence.seq_id]

    def begin(self, now: float) -> None:
        """Line up the oldest."""
        if not self._is_sorted:
            self._waiting = dict(sorted(self._waiting.items()))
            self._is_sorted = True
        self._offers = list(islice(self._waiting.values(), LOOK_AHEAD))
        self._offers.reverse()
        self._passed = []
        self._is_blocked = False
        self._first = self._offers[-1] if self._offers else None

    @property
    def first_in_line(self) -> Sequence | None:
        """The oldest."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the oldest not yet offered in this step."""
        if self._is_blocked or not self._offers:
            return None
        return self._offers.pop()

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Go on, count who was passed, or stop."""
        if outcome is Outcome.ADMITTED:
            del self._waiting[sequence.seq_id]
            for older in self._passed:
                older.num_bypassed += 1
            self._is_blocked = any(older.num_bypassed >= MAX_BYPASS for older in self._passed)
        elif outcome is Outcome.NO_PAGES:
            self._is_blocked = True
        elif outcome is not Outcome.ADAPTER_LOADING:
            self._passed.append(sequence)
            self._is_blocked = sequence.num_bypassed >= MAX_BYPASS

    def finish(self, sequence: Sequence, now: float) -> None:
        """Nothing to give back."""
