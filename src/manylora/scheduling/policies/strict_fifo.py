"""First come, first served, without passing: a request that cannot run holds up all that came later.

No request starves: the oldest is first in line, and none is offered behind one that was refused.

Source: S-LoRA's queue, as the baseline that is published against; ``docs/adr/0016`` lists the rest of that baseline.
"""

from __future__ import annotations

from manylora.scheduling.policies.line import Line
from manylora.scheduling.policy import Outcome, PolicyContext, QueueStatus
from manylora.scheduling.sequence import Sequence

__all__ = ["StrictFifoPolicy"]


class StrictFifoPolicy:
    """Offers the oldest, then the next if that one was admitted."""

    def __init__(self, context: PolicyContext) -> None:
        self._waiting = Line()
        self._is_blocked = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        """Take in a sequence; its place is by ``seq_id``."""
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        self._waiting.remove(sequence)

    def squash(self, now: float) -> list[Sequence]:
        """None: no request passes another."""
        return []

    def begin(self, now: float) -> None:
        """Let the oldest go first."""
        self._is_blocked = False

    @property
    def first_in_line(self) -> Sequence | None:
        """The oldest; after an admission, the next."""
        return self._waiting.head

    def offer(self) -> Sequence | None:
        """Return the oldest, unless one was refused in this step."""
        return None if self._is_blocked else self._waiting.head

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Go on only if the sequence was let in."""
        if outcome is Outcome.ADMITTED:
            self._waiting.remove(sequence)
        else:
            self._is_blocked = True

    def finish(self, sequence: Sequence, now: float) -> None:
        """Nothing to give back."""

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Let it wait again, in its old place."""
        self.add(sequence, now)

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the oldest."""
        return self._waiting.oldest(count)

    def queues(self) -> tuple[QueueStatus, ...]:
        """One line."""
        return (QueueStatus(num_waiting=len(self._waiting)),)
