"""Shortest job first with ageing: by predicted tokens still to come, less what the request has waited for.

A request's key is its predicted tokens plus ``ageing * arrival time``. Among those waiting at any moment that is
the order of "predicted tokens minus ``ageing`` per second waited", and it never changes while they wait, so
a sorted list is enough and nothing is recomputed as time goes on.

Nobody starves: a newcomer goes ahead only of those that have waited less than ``(their length - its length) /
ageing`` seconds, so everybody gets to the front; whoever is first in line stays so until admitted and is
offered first, and is passed a bounded number of times.

Source: the shortest-job-first scheduler of uServe, as section 5.3 of the Chameleon paper compares with. Neither
gives a rate of ageing; ours is what one request decodes in a second.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from manylora.scheduling.bypass import LOOK_AHEAD, Bypass
from manylora.scheduling.policy import Outcome, PolicyContext, QueueStatus
from manylora.scheduling.sequence import Sequence

__all__ = ["ShortestFirstPolicy"]

_Key = tuple[float, int]


class ShortestFirstPolicy:
    """Offers the first in line, then sequences by key; a pre-empted one comes back with what is left of it."""

    def __init__(self, context: PolicyContext) -> None:
        self._predictor = context.predictor
        self._ageing = context.config.ageing_tokens_per_s
        self._keys: dict[int, _Key] = {}  # by seq_id
        self._waiting: dict[int, Sequence] = {}
        self._order: list[_Key] = []
        self._bypass = Bypass()
        self._first: Sequence | None = None
        self._offers: list[Sequence] | None = None  # lined up when first asked for: most steps have no seat
        self._is_blocked = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        """Predict its length and put it in its place."""
        tokens = self._predictor.predict(sequence).p50 - sequence.num_output_tokens
        key = (tokens + self._ageing * sequence.arrived_at, sequence.seq_id)
        self._keys[sequence.seq_id] = key
        self._waiting[sequence.seq_id] = sequence
        insort(self._order, key)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        self._take_out(sequence)
        self._bypass.forgive(sequence)

    def squash(self, now: float) -> list[Sequence]:
        """Nobody: who passes stays."""
        return []

    def begin(self, now: float) -> None:
        """Keep the first in line if it still waits, else name the shortest."""
        worn = self._bypass.exhausted
        if worn is not None:
            self._first = worn
        elif self._first is None or self._first.seq_id not in self._waiting:
            self._first = self._waiting[self._order[0][1]] if self._order else None
        self._offers = None
        self._is_blocked = False

    @property
    def first_in_line(self) -> Sequence | None:
        """Who was shortest when the last one was admitted, or was passed too often."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the next by key, after the first in line."""
        if self._offers is None:
            self._offers = self.upcoming(LOOK_AHEAD)
            self._offers.reverse()
        return self._offers.pop() if self._offers and not self._is_blocked else None

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Go on, count who was passed, or stop."""
        if outcome is Outcome.ADMITTED:
            self._take_out(sequence)
        self._is_blocked = self._bypass.report(sequence, outcome)

    def finish(self, sequence: Sequence, now: float) -> None:
        """Nothing to give back."""

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Let it wait again, with what is left of it as its length."""
        self.add(sequence, now)

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the first in line and the next by key."""
        rest = [self._waiting[seq_id] for _, seq_id in self._order[:count]]
        if self._first is None or self._first.seq_id not in self._waiting:
            return rest
        return [self._first, *(one for one in rest if one is not self._first)][:count]

    def queues(self) -> tuple[QueueStatus, ...]:
        """One line."""
        return (QueueStatus(num_waiting=len(self._waiting)),)

    def _take_out(self, sequence: Sequence) -> None:
        del self._waiting[sequence.seq_id]
        del self._order[bisect_left(self._order, self._keys.pop(sequence.seq_id))]
