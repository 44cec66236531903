"""Requests that can run go first: adapters on the device, then loading ones, then on the host, then on disk.

Inside each class it is first come, first served. The core holds the cap on distinct adapters in a step
(``max_loras``) and prefetches the adapters of the next sequences.

The first in this order is first in line for memory, and once it is admitted the next, until one is refused; after
that, only an oldest that has come to be due. Were it always the oldest, a pool full of adapters that requests wait for
would let hardly any other run.

No request starves. A request is *due* once ``MAX_BYPASS`` more requests were admitted than stood before it when it
came. While the oldest is due it goes first, whatever its class, and if it is refused no other is admitted, except
while its adapter is loading. So none is passed by more than ``MAX_BYPASS`` younger requests.

Source: the LoRA scheduler extension of the vLLM multi-adapter article (``reorder_waiting_queue``), which lets
cold requests starve; the due date is ours. Only the oldest ``LOOK_AHEAD`` are put in order.
"""

from __future__ import annotations

from manylora.core.scheduling.policies.fifo import LOOK_AHEAD, MAX_BYPASS, StrictFifoPolicy
from manylora.core.scheduling.policy import Outcome, PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["AdapterAwarePolicy"]


class AdapterAwarePolicy(StrictFifoPolicy):
    """Offers the oldest when it is due, else sequences by the nearness of their adapters."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._nearness = context.nearness
        self._due: dict[int, int] = {}  # by seq_id: the number of admissions at which it is due
        self._num_admitted = 0
        self._first: Sequence | None = None
        self._refused: dict[int, Outcome] = {}  # in this step, by seq_id
        self._by_age: list[Sequence] = []
        self._by_nearness: list[Sequence] | None = None  # sorted when first asked for: most steps have no seat
        self._offered: set[int] = set()

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence and note when it is due."""
        self._due[sequence.seq_id] = self._num_admitted + len(self._waiting) + MAX_BYPASS
        super().add(sequence, now)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        super().remove(sequence)
        del self._due[sequence.seq_id]

    def begin(self, now: float) -> None:
        """Put the oldest in order."""
        super().begin(now)
        self._by_age = self._waiting.oldest(LOOK_AHEAD)
        self._by_age.reverse()
        self._by_nearness = None
        self._first = self._waiting.head
        self._refused.clear()
        self._offered.clear()

    @property
    def first_in_line(self) -> Sequence | None:
        """The oldest before the first offer, then the last one offered that nothing was refused before."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the oldest if it is due, else the oldest of the nearest class."""
        if self._is_blocked:
            return None
        sequence = self._next_of(self._by_age)
        if sequence is not None and not self._is_due(sequence):
            self._by_age.append(sequence)
            if self._by_nearness is None:
                # Stable, and popped from the end: by age inside each class.
                self._by_nearness = sorted(self._by_age, key=self._nearness, reverse=True)
            sequence = self._next_of(self._by_nearness)
        if sequence is not None:
            self._offered.add(sequence.seq_id)
            if not self._refused or self._may_not_be_passed(sequence):
                self._first = sequence
        return sequence

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Continue, or stop: for want of KV pages, or because a due sequence may not be passed any more."""
        if outcome is Outcome.ADMITTED:
            self.remove(sequence)
            self._num_admitted += 1
            oldest = self._waiting.head  # it may have come to be due after its refusal
            self._is_blocked = oldest is not None and self._holds_others_back(oldest)
            return
        self._refused[sequence.seq_id] = outcome
        self._is_blocked = outcome is Outcome.NO_PAGES or self._holds_others_back(sequence)

    def _holds_others_back(self, sequence: Sequence) -> bool:
        outcome = self._refused.get(sequence.seq_id, Outcome.ADAPTER_LOADING)
        return outcome is not Outcome.ADAPTER_LOADING and self._may_not_be_passed(sequence)

    def _may_not_be_passed(self, sequence: Sequence) -> bool:
        return sequence is self._waiting.head and self._is_due(sequence)

    def _is_due(self, sequence: Sequence) -> bool:
        return self._num_admitted >= self._due[sequence.seq_id]

    def _next_of(self, sequences: list[Sequence]) -> Sequence | None:
        while sequences:
            sequence = sequences.pop()
            if sequence.seq_id not in self._offered:
                return sequence
        return None
