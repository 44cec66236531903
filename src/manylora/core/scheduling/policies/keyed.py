"""Policies given by one number per request: the least goes first, and no request starves whatever the number is.

Orders by size, by deadline or by importance differ only in the number. Everything else is here::

    def by_prompt(context: PolicyContext) -> Policy:
        return KeyedPolicy(lambda sequence, now: sequence.num_to_run)

No request starves. A first in line that was refused stays so until admitted, even if a sequence with a lesser key
arrives. The oldest of all is passed by at most ``MAX_BYPASS`` admissions (``fifo.py``), whether it was offered or not;
then it is first in line, and no other is admitted. So every request comes to be the oldest, and one behind ``n`` others
waits for at most ``n + 1`` times as many admissions. A key that grows with the time of arrival needs no such bound,
because late requests never go before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from manylora.core.options import CheckedOptions, option
from manylora.core.scheduling.policies.fifo import LOOK_AHEAD, Bypass, Line
from manylora.core.scheduling.policy import Outcome, Policy, PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["Key", "KeyedPolicy", "PriorityPolicy", "ShortestFirstPolicy"]

FURTHEST_LEVEL = 1000  # priorities beyond this, from 0, count as this: a request may bring any number

Key = Callable[[Sequence, float], float]
"""The number of a sequence that begins to wait, at a time in seconds; fixed while it waits."""


class KeyedPolicy(Policy):
    """Offers the first in line, then sequences by key, least first; a pre-empted one comes back with a new key.

    Of equal keys the first to arrive goes first. If a key ``ages``, it grows with the time of arrival, so that every
    request comes to the front without a bound on passing.
    """

    def __init__(self, key: Key, *, ages: bool = False) -> None:
        self._key = key
        self._waiting: dict[int, Sequence] = {}  # by seq_id
        self._keys: dict[int, tuple[float, int]] = {}  # by seq_id: the key and, for equals, the seq_id
        self._order: list[tuple[float, int]] = []
        self._by_arrival = None if ages else Line()
        self._bypass = Bypass()
        self._first: Sequence | None = None
        self._refused: Sequence | None = None  # a first in line that was refused
        self._offers: list[Sequence] | None = None  # made when first asked for: most steps have no seat
        self._is_blocked = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        """Insert a sequence by its key."""
        self._waiting[sequence.seq_id] = sequence
        self._insert(sequence, self._key(sequence, now))
        if self._by_arrival is not None:
            self._by_arrival.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        self._take_out(sequence)
        self._bypass.forgive(sequence)

    def reorder(self, key: Callable[[Sequence], float]) -> None:
        """Give every waiting sequence a new key."""
        self._order.clear()
        for sequence in self._waiting.values():
            self._insert(sequence, key(sequence))

    def begin(self, now: float) -> None:
        """Keep a first in line that was refused while it waits; otherwise choose the sequence of least key."""
        if self._by_arrival is not None and self._by_arrival.head is not None:
            # A request that goes before the oldest passes it, whether that was offered or not.
            self._bypass.refuse(self._by_arrival.head)
        refused, least = self._refused, self._order[0][1] if self._order else None
        if refused is not None and refused.seq_id in self._waiting:
            least = refused.seq_id
        self._first = self._bypass.exhausted or (self._waiting[least] if least is not None else None)
        self._offers = None
        self._is_blocked = False

    @property
    def first_in_line(self) -> Sequence | None:
        """The first in line: the sequence of least key when it was first refused, or one passed too often."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the next by key, after the first in line."""
        if self._offers is None:
            self._offers = self.upcoming(LOOK_AHEAD)
            self._offers.reverse()
        return self._offers.pop() if self._offers and not self._is_blocked else None

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Continue, count the sequences that were passed, or stop."""
        if outcome is Outcome.ADMITTED:
            self._take_out(sequence)
        if sequence is self._first:
            self._refused = None if outcome is Outcome.ADMITTED else sequence
        self._is_blocked = self._bypass.report(sequence, outcome)

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the first in line and the next by key."""
        rest = [self._waiting[seq_id] for _, seq_id in self._order[:count]]
        if self._first is None or self._first.seq_id not in self._waiting:
            return rest
        return [self._first, *(one for one in rest if one is not self._first)][:count]

    def _insert(self, sequence: Sequence, key: float) -> None:
        placed = self._keys[sequence.seq_id] = (key, sequence.seq_id)
        insort(self._order, placed)

    def _take_out(self, sequence: Sequence) -> None:
        del self._waiting[sequence.seq_id]
        del self._order[bisect_left(self._order, self._keys.pop(sequence.seq_id))]
        if self._by_arrival is not None:
            self._by_arrival.remove(sequence)


class PriorityPolicy(KeyedPolicy):
    """Offers the first in line, then the most urgent, by the priority of requests (lower is sooner) and arrival.

    vLLM's order by priority is strict: a stream of urgent requests starves all others. Here a level is worth a time of
    waiting. A request's key is its arrival plus that time for every level, which never changes while it waits.

    No request starves: a request of level p is passed only by requests of a lower level q that come less than ``(p - q)
    * priority_step_s`` seconds after it.

    Source: vLLM's ``--scheduling-policy priority``; the worth of a level is ours.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options(CheckedOptions):
        """The worth of a level."""

        priority_step_s: float = option(
            60.0,
            panel="Scheduling",
            unit="s",
            above=0,
            help="Under priority: time of waiting that makes up for one level.",
        )

    def __init__(self, context: PolicyContext) -> None:
        step_s: float = context.options.priority_step_s

        def key(sequence: Sequence, now: float) -> float:
            level = max(-FURTHEST_LEVEL, min(FURTHEST_LEVEL, sequence.request.priority))
            return sequence.arrived_at + step_s * level

        super().__init__(key, ages=True)


class ShortestFirstPolicy(KeyedPolicy):
    """Offers the first in line, then the shortest, by predicted remaining tokens less a credit for the time waited.

    A request's key is its predicted tokens plus ``ageing * arrival time``. At any moment that is the order of
    "predicted tokens minus ``ageing`` per second waited", and it never changes while requests wait, so a sorted list is
    enough. A pre-empted sequence comes back with its remaining length.

    No request starves: a new one goes ahead only of those that have waited less than ``(their length - its length) /
    ageing`` seconds, so every request gets to the front.

    Source: the shortest-job-first scheduler of uServe, as compared with in section 5.3 of the Chameleon paper. Neither
    gives a rate of ageing; ours is the decoding rate of one request.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options(CheckedOptions):
        """The rate of ageing."""

        ageing_tokens_per_s: float = option(
            50.0,
            panel="Scheduling",
            flag="--ageing",
            metavar="TOKENS",
            unit="tokens per second",
            above=0,
            help="Under sjf: predicted tokens that a second of waiting makes up for.",
        )

    def __init__(self, context: PolicyContext) -> None:
        ageing: float = context.options.ageing_tokens_per_s

        def key(sequence: Sequence, now: float) -> float:
            tokens = context.predictor.predict(sequence).p50 - sequence.num_output_tokens
            return tokens + ageing * sequence.arrived_at

        super().__init__(key, ages=True)
