"""The running set: the sequences that hold pages, how they grow, and how they leave it.

Every sequence is admitted with pages for all its tokens, so only decoding sequences grow. When a page is missing then,
idle pages are evicted first, then adapters that waiting requests use, then the youngest sequence is pre-empted (its
tokens are kept, its KV is computed again).

Liveness: sequences are ordered by arrival. The oldest running one may pre-empt every other; the policy's first in line
may claim every page that running sequences do not hold; a request is accepted only if it fits without others. So the
oldest always ends, and by induction all do.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import attrgetter

from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.loader import LoadsInFlight
from manylora.core.engine.status import Telemetry
from manylora.core.events import RequestPreempted, RequestSquashed
from manylora.core.memory import Depth, PageCache
from manylora.core.plan import Placement
from manylora.core.scheduling import Policy, Sequence, SequenceStatus
from manylora.core.types import AdapterKey

__all__ = ["LateSequences", "RunningSet"]

_BY_ARRIVAL = attrgetter("seq_id")


@dataclass(eq=False)
class RunningSet:
    """Running sequences, oldest arrival first."""

    _page_cache: PageCache
    _cache: AdapterCache
    _loads: LoadsInFlight
    _policy: Policy  # the waiting sequences
    _telemetry: Telemetry
    # Those that run, and those that have ended while a step in flight uses their pages.
    sequences: list[Sequence] = field(default_factory=list)
    first_in_line: Sequence | None = None  # the policy's first in line of the last step, if it was not admitted
    # Whether a sequence was refused in the last step although seats are free, and not for a copy of its adapter.
    is_full: bool = False

    # -- in and out --------------------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, placement: Placement, now: float) -> None:
        """Add a sequence that was admitted, with its adapter's weights at ``placement``."""
        insort(self.sequences, sequence, key=_BY_ARRIVAL)
        if sequence.adapter is not None:
            self._cache.hold(sequence.adapter, now, placement)
            self._cache.unwant(sequence.adapter, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence that ended; release its pages and its adapter."""
        self._take_out(sequence, now)
        self._policy.finish(sequence, now)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Let a running sequence wait again: its pages are for an older one, or its adapter is late."""
        self._telemetry.counters.num_preemptions += 1
        self._telemetry.emit(RequestPreempted(now, sequence.request.request_id, sequence.num_computed))
        self._send_back(sequence, now)

    def squash(self, sequence: Sequence, now: float) -> None:
        """Let a running sequence wait again, because a sequence that it passed can run."""
        self._telemetry.counters.num_squashes += 1
        self._telemetry.emit(RequestSquashed(now, sequence.request.request_id, sequence.num_computed))
        self._send_back(sequence, now)

    def _send_back(self, sequence: Sequence, now: float) -> None:
        """Let a running sequence wait again; its tokens are kept, and their KV is computed again."""
        if sequence.adapter is not None:
            self._cache.want(sequence.adapter, now)
        self._take_out(sequence, now)
        sequence.sent_back()
        self._policy.send_back(sequence, now)

    def _take_out(self, sequence: Sequence, now: float) -> None:
        self.sequences.remove(sequence)
        self._page_cache.release_kv(sequence.table.clear(), now)
        if sequence.adapter is not None:
            self._cache.release(sequence.adapter, now)

    # -- adapters that move ------------------------------------------------------------------------------------------

    def moved(self, key: AdapterKey, placement: Placement) -> None:
        """Learn that an adapter's weights moved: its sequences read them there from the next step on."""
        for sequence in self.sequences:
            if sequence.adapter == key:
                sequence.moved(placement)

    # -- growth ------------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, now: float, *, may_preempt: bool = True) -> bool:
        """Claim a page for a decoding sequence's next token; return whether it can run in this step.

        Idle pages are evicted first, then adapters that waiting requests use (the adapter of the first in line only if
        it is younger). Then younger running sequences are pre-empted, youngest first; at last the sequence itself.
        """
        first = self.first_in_line
        is_waiting = first is not None and first.status is SequenceStatus.WAITING
        spare = first.adapter if first is not None and is_waiting and first.seq_id < sequence.seq_id else None
        while True:
            pages = self._page_cache.claim_kv(1, now, Depth.WANTED, spare=spare)
            if pages is not None:
                sequence.grew(pages)
                return True
            if not may_preempt:
                return False
            youngest = self.sequences[-1]
            if youngest is sequence and len(self.sequences) == 1 and self._loads.in_flight:
                return False  # loading adapters hold the pages: they can be claimed once loaded
            self.preempt(youngest, now)
            if youngest is sequence:
                return False


class LateSequences:
    """Sequences that steps did not wait for, since the weights of their adapter were late, until they are sent back.

    ::

        step n        waits, goes on without them         --> late: no token, no valid KV
        step n + 1    was planned ahead, may have them    --> left out by the executor
        after both    they wait again, for the whole adapter: no step begins on the layers of that load any more
    """

    def __init__(self, running: RunningSet, cache: AdapterCache) -> None:
        self.sequences: list[Sequence] = []  # those that were not sent back yet
        self._running = running
        self._cache = cache

    def add(self, sequences: Seq[Sequence], late: Collection[int]) -> list[Sequence]:
        """Record the late sequences of a step, by ``seq_id``; return those that were not late before."""
        added = [
            sequence
            for sequence in sequences
            if sequence.seq_id in late and not sequence.is_late and sequence.status is SequenceStatus.RUNNING
        ]
        for sequence in added:
            assert sequence.adapter is not None
            self._cache.residencies[sequence.adapter].was_late()
            sequence.was_late()
        self.sequences += added
        return added

    def send_back(self, now: float) -> None:
        """Pre-empt the late sequences that no step in flight has any more, unless they have ended or are about to."""
        left = [sequence for sequence in self.sequences if sequence.num_in_flight]
        for sequence in self.sequences:
            if not sequence.num_in_flight and sequence.status is SequenceStatus.RUNNING and sequence.ending is None:
                self._running.preempt(sequence, now)
        self.sequences = left
