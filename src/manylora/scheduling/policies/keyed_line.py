"""A waiting line by key, least first, that keeps the first in it its turn; shared by orders by size.

Keys do not change by themselves while sequences wait, so a sorted list is enough. The first in line stays so
until admitted, whatever comes with a lesser key, unless another has been passed as often as a request may be
(``bypass.py``): then that one is. Both keep an order by size from starving requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from manylora.scheduling.policies.bypass import LOOK_AHEAD, Bypass
from manylora.scheduling.policy import Outcome
from manylora.scheduling.sequence import Sequence

__all__ = ["KeyedLine"]

_Key = tuple[float, int]


class KeyedLine:
    """Sequences by ``(key, seq_id)``, and the offers of one step."""

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}  # by seq_id
        self._keys: dict[int, _Key] = {}
        self._order: list[_Key] = []
        self._bypass = Bypass()
        self._first: Sequence | None = None
        self._offers: list[Sequence] | None = None  # lined up when first asked for: most steps have no seat
        self._is_blocked = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, key: float) -> None:
        """Put a sequence in its place."""
        self._waiting[sequence.seq_id] = sequence
        self._put(sequence, key)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._take_out(sequence)
        self._bypass.forgive(sequence)

    def reorder(self, key: Callable[[Sequence], float]) -> None:
        """Give every sequence a new key."""
        self._order.clear()
        for sequence in self._waiting.values():
            self._put(sequence, key(sequence))

    def pass_by(self, sequence: Sequence) -> None:
        """Count every younger one that is let in from now on as passing this sequence."""
        self._bypass.refuse(sequence)

    def begin(self) -> None:
        """Begin a step: keep the first in line if it still waits, else name the one of least key."""
        worn = self._bypass.exhausted
        if worn is not None:
            self._first = worn
        elif self._first is None or self._first.seq_id not in self._waiting:
            self._first = self._waiting[self._order[0][1]] if self._order else None
        self._offers = None
        self._is_blocked = False

    @property
    def first(self) -> Sequence | None:
        """Who had the least key when the last one was admitted, or was passed too often."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the next by key, after the first in line."""
        if self._offers is None:
            self._offers = self.upcoming(LOOK_AHEAD)
            self._offers.reverse()
        return self._offers.pop() if self._offers and not self._is_blocked else None

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Take out an admitted one; go on, count the passed ones, or stop."""
        if outcome is Outcome.ADMITTED:
            self._take_out(sequence)
        self._is_blocked = self._bypass.report(sequence, outcome)

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the first in line and the next by key."""
        rest = [self._waiting[seq_id] for _, seq_id in self._order[:count]]
        if self._first is None or self._first.seq_id not in self._waiting:
            return rest
        return [self._first, *(one for one in rest if one is not self._first)][:count]

    def _put(self, sequence: Sequence, key: float) -> None:
        placed = self._keys[sequence.seq_id] = (key, sequence.seq_id)
        insort(self._order, placed)

    def _take_out(self, sequence: Sequence) -> None:
        del self._waiting[sequence.seq_id]
        del self._order[bisect_left(self._order, self._keys.pop(sequence.seq_id))]
