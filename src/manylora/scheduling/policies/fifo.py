"""First come, first served, except that a request without its adapter does not hold up those behind it.

A sequence whose adapter is loading is passed by younger ones: it could not run anyway. One that lacks room for its
adapter, or that the adapter cap keeps out, may be passed a bounded number of times (``bypass.py``). One that lacks room
for KV is never passed.

No request starves: the oldest is first in line until admitted, and is passed a bounded number of times.

Source: vLLM admits first come, first served. S-LoRA does as well, without bypassing (``strict_fifo.py``).
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
        """Continue, count the passed ones, or stop."""
        if outcome is Outcome.ADMITTED:
            self._waiting.remove(sequence)
        self._is_blocked = self._bypass.report(sequence, outcome)
