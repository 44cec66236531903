"""Orders of arrival: strict, which nothing passes, and first in first out, where a missing adapter holds up no other.

Under ``strict-fifo`` a request that cannot run holds up all that came later. No request starves: the oldest is first in
line, and none is offered behind a refused one. Source: S-LoRA's queue, as the baseline of published comparisons;
``docs/adr/0016`` lists the rest of that baseline.

Under ``fifo`` a sequence whose adapter is loading is passed by younger ones: it could not run anyway. A sequence that
lacks room for its adapter, or that the adapter cap keeps out, may be passed a bounded number of times (``waiting.py``).
A sequence that lacks room for KV is never passed. No request starves: the oldest is first in line until admitted, and
is passed a bounded number of times. Source: vLLM admits first come, first served.
"""

from __future__ import annotations

from manylora.core.scheduling.policies.waiting import LOOK_AHEAD, Bypass, Line
from manylora.core.scheduling.policy import Outcome, Policy, PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["FifoPolicy", "StrictFifoPolicy"]


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


class FifoPolicy(StrictFifoPolicy):
    """Offers sequences by order of arrival, also behind refused sequences; a pre-empted sequence keeps its place."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._bypass = Bypass()
        self._offers: list[Sequence] = []
        self._first: Sequence | None = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        super().remove(sequence)
        self._bypass.forgive(sequence)

    def begin(self, now: float) -> None:
        """Collect the oldest, for the offers of this step."""
        super().begin(now)
        self._offers = self._waiting.oldest(LOOK_AHEAD)
        self._offers.reverse()
        self._first = self._waiting.head

    @property
    def first_in_line(self) -> Sequence | None:
        """The oldest when the step began."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the oldest not yet offered in this step."""
        return self._offers.pop() if self._offers and not self._is_blocked else None

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Continue, count the sequences that were passed, or stop."""
        if outcome is Outcome.ADMITTED:
            self._waiting.remove(sequence)
        self._is_blocked = self._bypass.report(sequence, outcome)
