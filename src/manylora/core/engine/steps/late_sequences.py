"""Sequences that a step has given up: the weights of their adapter were late, and the whole batch waited for them.

::

    step n        waits, goes on without them         --> given up: no token, no valid KV
    step n + 1    was planned ahead, may have them    --> left out by the executor
    after both    they wait again, for the whole adapter: no step begins on the layers of that load any more
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.prompt_logprobs import PromptReports
from manylora.core.engine.steps.running import RunningSet
from manylora.core.scheduling import Sequence, SequenceStatus

__all__ = ["LateSequences"]


class LateSequences:
    """The sequences that steps have given up, until they are sent back; false if there are none."""

    def __init__(
        self, *, running: RunningSet, cache: AdapterCache, cold_starts: ColdStarts, reports: PromptReports
    ) -> None:
        self._running = running
        self._cache = cache
        self._cold_starts = cold_starts
        self._reports = reports
        self._sequences: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def add(self, sequences: Seq[Sequence], late: Collection[int], now: float) -> None:
        """Learn which sequences of a step were late, by ``seq_id``; before its tokens are processed."""
        for sequence in sequences:
            if sequence.seq_id in late and not sequence.is_given_up and sequence.status is SequenceStatus.RUNNING:
                assert sequence.adapter is not None
                self._cache.residency(sequence.adapter).was_late()
                self._cold_starts.was_late(sequence, now)
                self._reports.again(sequence)
                sequence.given_up()
                self._sequences.append(sequence)

    def send_back(self, now: float) -> None:
        """Send back those that no step in flight has any more, unless they have ended or are about to."""
        left = [sequence for sequence in self._sequences if sequence.num_in_flight]
        for sequence in self._sequences:
            if not sequence.num_in_flight and sequence.status is SequenceStatus.RUNNING and sequence.ending is None:
                self._running.preempt(sequence, now)
        self._sequences = left
