"""The line of waiting sequences, the bound on passing in it, and the orders of arrival.

Under any policy, a request that was offered and refused may be passed by at most ``MAX_BYPASS`` younger ones. Then the
policy admits no other until running sequences end and it gets its turn. Waiting for a load does not count: the request
could not run anyway, and a load ends by itself. Source: ours. S-LoRA, Punica and vLLM let a request starve at their
adapter limit; Chameleon (section 4.3.3) bounds bypassing only by prediction, which bounds nothing when predictions are
wrong.

Under ``strict-fifo`` a request that cannot run holds up all that came later. No request starves: the oldest is first in
line, and none is offered behind a refused one. Source: S-LoRA's queue, as the baseline of published comparisons;
``docs/baselines.md`` lists the rest of that baseline.

Under ``fifo`` a sequence whose adapter is loading is passed by younger ones: it could not run anyway. A sequence that
lacks room for its adapter, or that the adapter cap keeps out, may be passed a bounded number of times.
A sequence that lacks room for KV is never passed. No request starves: the oldest is first in line until admitted, and
is passed a bounded number of times. Source: vLLM admits first come, first served.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from manylora.core.scheduling.policy import Outcome, Policy, PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["LOOK_AHEAD", "MAX_BYPASS", "Bypass", "FifoPolicy", "Line", "StrictFifoPolicy"]

MAX_BYPASS = 64
LOOK_AHEAD = 256  # most waiting sequences looked at in one step: bounds the cost of a step when thousands wait

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


class Bypass:
    """Remembers refused sequences, and counts younger sequences admitted since."""

    def __init__(self) -> None:
        self._refused: dict[int, Sequence] = {}

    @property
    def exhausted(self) -> Sequence | None:
        """The oldest sequence that was passed ``MAX_BYPASS`` times, and may not be passed again; or ``None``."""
        exhausted = [sequence for sequence in self._refused.values() if sequence.num_bypassed >= MAX_BYPASS]
        return min(exhausted, key=lambda sequence: sequence.seq_id, default=None)

    def refuse(self, sequence: Sequence) -> None:
        """Count younger sequences admitted from now on as passing this one."""
        self._refused[sequence.seq_id] = sequence

    def forgive(self, sequence: Sequence) -> None:
        """Stop counting: the sequence is gone, admitted, or waits for a load."""
        self._refused.pop(sequence.seq_id, None)

    def admit(self, sequence: Sequence) -> bool:
        """Count an admission as a pass for every older refused sequence; return whether any is now exhausted."""
        self.forgive(sequence)
        is_exhausted = False
        for older in self._refused.values():
            if older.seq_id < sequence.seq_id:
                older.passed()
                is_exhausted |= older.num_bypassed >= MAX_BYPASS
        return is_exhausted

    def report(self, sequence: Sequence, outcome: Outcome) -> bool:
        """Learn the outcome of an offer; return whether the step must admit no other sequence."""
        match outcome:
            case Outcome.ADMITTED:
                return self.admit(sequence)
            case Outcome.NO_PAGES:
                return True
            case Outcome.ADAPTER_LOADING:
                self.forgive(sequence)
                return False
        self.refuse(sequence)
        return sequence.num_bypassed >= MAX_BYPASS


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
        self._offers: list[Sequence] | None = None  # made when first asked for: most steps have no seat
        self._first: Sequence | None = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        super().remove(sequence)
        self._bypass.forgive(sequence)

    def begin(self, now: float) -> None:
        """Name the first in line."""
        super().begin(now)
        self._offers = None
        self._first = self._waiting.head

    @property
    def first_in_line(self) -> Sequence | None:
        """The oldest when the step began."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the oldest not yet offered in this step."""
        if self._offers is None:
            self._offers = self._waiting.oldest(LOOK_AHEAD)
            self._offers.reverse()
        return self._offers.pop() if self._offers and not self._is_blocked else None

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Continue, count the sequences that were passed, or stop."""
        if outcome is Outcome.ADMITTED:
            self._waiting.remove(sequence)
        self._is_blocked = self._bypass.report(sequence, outcome)
