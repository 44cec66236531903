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

from manylora.scheduling.keyed_line import KeyedLine
from manylora.scheduling.policy import Outcome, PolicyContext, QueueStatus
from manylora.scheduling.sequence import Sequence

__all__ = ["ShortestFirstPolicy"]


class ShortestFirstPolicy:
    """Offers the first in line, then sequences by key; a pre-empted one comes back with what is left of it."""

    def __init__(self, context: PolicyContext) -> None:
        self._predictor = context.predictor
        self._ageing = context.config.ageing_tokens_per_s
        self._line = KeyedLine()

    def __len__(self) -> int:
        return len(self._line)

    def add(self, sequence: Sequence, now: float) -> None:
        """Predict its length and put it in its place."""
        tokens = self._predictor.predict(sequence).p50 - sequence.num_output_tokens
        self._line.add(sequence, tokens + self._ageing * sequence.arrived_at)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        self._line.remove(sequence)

    def squash(self, now: float) -> list[Sequence]:
        """Nobody: who passes stays."""
        return []

    def begin(self, now: float) -> None:
        """Keep the first in line if it still waits, else name the shortest."""
        self._line.begin()

    @property
    def first_in_line(self) -> Sequence | None:
        """Who was shortest when the last one was admitted, or was passed too often."""
        return self._line.first

    def offer(self) -> Sequence | None:
        """Return the next by key, after the first in line."""
        return self._line.offer()

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Go on, count who was passed, or stop."""
        self._line.report(sequence, outcome)

    def finish(self, sequence: Sequence, now: float) -> None:
        """Nothing to give back."""

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Let it wait again, with what is left of it as its length."""
        self.add(sequence, now)

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the first in line and the next by key."""
        return self._line.upcoming(count)

    def queues(self) -> tuple[QueueStatus, ...]:
        """One line."""
        return (QueueStatus(num_waiting=len(self._line)),)
