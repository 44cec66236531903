"""First come, first served, without bypassing: a request that cannot run holds up all that came later.

No request starves: the oldest is first in line, and none is offered behind one that was refused.

Source: S-LoRA's queue, as the baseline of published comparisons; ``docs/adr/0016`` lists the rest of that baseline.
"""

from __future__ import annotations

from manylora.scheduling.policies.line import Line
from manylora.scheduling.policy import Outcome, Policy, PolicyContext
from manylora.scheduling.sequence import Sequence

__all__ = ["StrictFifoPolicy"]


class StrictFifoPolicy(Policy):
    """Offers the oldest, then the next if that one was admitted; a pre-empted one keeps its place."""

    def __init__(self, context: PolicyContext) -> None:
        self._waiting = Line()
        self._is_blocked = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence; its place is by ``seq_id``."""
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        self._waiting.remove(sequence)

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
        """Continue only if the sequence was admitted."""
        if outcome is Outcome.ADMITTED:
            self._waiting.remove(sequence)
        else:
            self._is_blocked = True

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the oldest."""
        return self._waiting.oldest(count)
