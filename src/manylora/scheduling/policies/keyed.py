"""A policy that is one number per request: least goes first, and no request starves whatever the number is.

Orders by size, by deadline or by importance differ in the number alone; the rest of ``policy.py`` is the same for all
of them and is here::

    def by_prompt(context: PolicyContext) -> Policy:
        return KeyedPolicy(lambda sequence, now: sequence.num_to_run)

No request starves: the first in line stays so until admitted. The oldest of all is passed by ``MAX_BYPASS`` admissions
at most (``bypass.py``), whether it was offered or not, then is first in line, and alone; so every request comes to be
the oldest, and behind ``n`` others waits for ``n + 1`` times as many at the worst. A key that grows with the time of
arrival needs no such bound, because none that comes late enough goes before (``sjf.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from manylora.scheduling.policies.keyed_line import KeyedLine
from manylora.scheduling.policies.line import Line
from manylora.scheduling.policy import Outcome, QueueStatus
from manylora.scheduling.sequence import Sequence

__all__ = ["Key", "KeyedPolicy"]

Key = Callable[[Sequence, float], float]
"""The number of a sequence that begins to wait, at a time in seconds; it keeps it while it waits."""


class KeyedPolicy:
    """Offers the first in line, then sequences by key; a pre-empted one comes back with a new key.

    Args:
        key: Least goes first; of equals, the first to arrive.
        ages: Whether keys grow with the time of arrival, so that every request comes to the front by them alone.
    """

    def __init__(self, key: Key, *, ages: bool = False) -> None:
        self._key = key
        self._line = KeyedLine()
        self._by_arrival = None if ages else Line()

    def __len__(self) -> int:
        return len(self._line)

    def add(self, sequence: Sequence, now: float) -> None:
        """Put it in its place."""
        self._line.add(sequence, self._key(sequence, now))
        if self._by_arrival is not None:
            self._by_arrival.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        self._line.remove(sequence)
        if self._by_arrival is not None:
            self._by_arrival.remove(sequence)

    def squash(self, now: float) -> list[Sequence]:
        """None: a request that passed stays."""
        return []

    def begin(self, now: float) -> None:
        """Keep the first in line if it still waits, else name the one of least key."""
        if self._by_arrival is not None and self._by_arrival.head is not None:
            # A request that goes before the oldest passes it, whether that was offered or not.
            self._line.pass_by(self._by_arrival.head)
        self._line.begin()

    @property
    def first_in_line(self) -> Sequence | None:
        """Who had the least key when the last one was admitted, or was passed too often."""
        return self._line.first

    def offer(self) -> Sequence | None:
        """Return the next by key, after the first in line."""
        return self._line.offer()

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Go on, count the passed ones, or stop."""
        if outcome is Outcome.ADMITTED and self._by_arrival is not None:
            self._by_arrival.remove(sequence)
        self._line.report(sequence, outcome)

    def finish(self, sequence: Sequence, now: float) -> None:
        """Nothing to give back."""

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Let it wait again, by what its key is now."""
        self.add(sequence, now)

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the first in line and the next by key."""
        return self._line.upcoming(count)

    def queues(self) -> tuple[QueueStatus, ...]:
        """One line."""
        return (QueueStatus(num_waiting=len(self._line)),)
