"""A waiting line: sequences in order of arrival, also after pre-emption."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from manylora.scheduling.sequence import Sequence

__all__ = ["Line"]

_BY_ARRIVAL = attrgetter("seq_id")


class Line:
    """A list sorted by ``seq_id``: arrivals append, a pre-empted sequence returns to its old place."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def head(self) -> Sequence | None:
        """The oldest, if any waits."""
        return self._sequences[0] if self._sequences else None

    def oldest(self, count: int) -> list[Sequence]:
        """Return up to ``count`` sequences, oldest first."""
        return self._sequences[:count]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by its ``seq_id``."""
        if not self._sequences or self._sequences[-1].seq_id < sequence.seq_id:
            self._sequences.append(sequence)
        else:
            self._sequences.insert(self._place(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        place = self._place(sequence)
        assert self._sequences[place] is sequence
        del self._sequences[place]

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, sequence.seq_id, key=_BY_ARRIVAL)
