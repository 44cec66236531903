"""First come, first served, except that a cold or capped request does not hold up those behind it.

A sequence whose adapter is on its way is passed by younger ones: it could not run anyway. One that lacks room
for its adapter, or that the adapter cap keeps out, may be passed as well, a bounded number of times
(``bypass.py``). One that lacks room for KV is never passed.

No request starves: the oldest is first in line until admitted, and is passed a bounded number of times.

Source: vLLM admits first come first served. S-LoRA does as well, and lets none pass: ``strict_fifo.py``, whose line
this is.
"""

from __future__ import annotations

from manylora.scheduling.policies.bypass import LOOK_AHEAD, Bypass
from manylora.scheduling.policies.strict_fifo import StrictFifoPolicy
from manylora.scheduling.policy import Outcome, PolicyContext
from manylora.scheduling.sequence import Sequence

__all__ = ["FifoPolicy"]


class FifoPolicy(StrictFifoPolicy):
    """Offers sequences by order of arrival, also behind refused ones; a pre-empted one keeps its place."""

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
        """Line up the oldest."""
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
        if self._is_blocked or not self._offers:
            return None
        return self._offers.pop()

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Go on, count the passed ones, or stop."""
        if outcome is Outcome.ADMITTED:
            self._waiting.remove(sequence)
        self._is_blocked = self._bypass.report(sequence, outcome)
