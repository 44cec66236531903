"""The limits of the queue: the engine refuses at once a request that it would answer too late.

For the predicted wait of a request, the queue is played forward in steps. Each seat is free when its sequence has its
predicted tokens; each waiting sequence takes the seat that is free first; the new one gets the first seat after all of
them::

    tokens left     seat 0  ====                waits:  1st  until seat 1 is free
                    seat 1  ==                          2nd  until seat 0 is free
                    seat 2  =========                   new  until the 1st has ended on seat 1, or seat 2 is free

A mean rate would not do: a flood that meets an idle engine fills all seats at once, and none is free for the time of a
whole answer. All prompts before the new one take their steps as well. Lengths come from the engine's predictor; the
time of a step is that of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heapreplace

from manylora.config import SchedulerConfig
from manylora.errors import CapacityError
from manylora.scheduling import LengthPredictor, Sequence, SequenceStatus

__all__ = ["QueueWait"]

WEIGHT = 1 / 16
"""Weight of the last step in the mean time of a step."""


class QueueWait:
    """Refuses requests beyond ``max_waiting`` and ``max_wait_s``; without the latter it predicts nothing.

    Args:
        scheduler: The limits of the queue, of a step, and of running sequences.
        predictor: Predicts the lengths of answers.
        sequences: All requests in flight, by id, in order of arrival.
        is_full: Whether a sequence waits for room although seats are free.
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerConfig,
        predictor: LengthPredictor,
        sequences: Mapping[str, Sequence],
        is_full: Callable[[], bool],
    ) -> None:
        self._max_waiting = scheduler.max_waiting
        self._max_wait_s = scheduler.max_wait_s
        self._num_step_tokens = scheduler.max_num_batched_tokens
        self._num_seats = min(scheduler.max_num_seqs, self._num_step_tokens)
        self._predictor = predictor
        self._sequences = sequences
        self._is_full = is_full
        self._step_s = 0.0
        self._stepped_at = 0.0
        self._lengths: dict[str, int] = {}  # predicted, by request id
        self._free_at: list[int] | None = None  # a heap: steps until each seat is free; none until it is asked for
        self._num_to_run = 0  # tokens of prompts, and the next of each answer

    def stepped(self, began_at: float, now: float) -> None:
        """Learn that a step ended; the time between two steps that follow each other is part of the second."""
        if self._max_wait_s is None:
            return
        took_s = now - began_at
        if began_at - self._stepped_at < took_s:
            took_s = now - self._stepped_at
        self._step_s += (took_s - self._step_s) * (WEIGHT if self._step_s else 1.0)
        self._stepped_at = now
        self._free_at = None

    def added(self, sequence: Sequence) -> None:
        """Learn that a request was accepted."""
        if self._free_at:
            heapreplace(self._free_at, self._free_at[0] + self._num_left(sequence))
            self._num_to_run += sequence.num_to_run

    def ended(self, sequence: Sequence) -> None:
        """Learn that a request ended, for any reason."""
        if self._lengths.pop(sequence.request.request_id, None) is not None:
            self._free_at = None

    def check(self, num_waiting: int, retry_after_s: Callable[[], float]) -> None:
        """Raise ``CapacityError`` if a new request would be refused now."""
        if num_waiting >= self._max_waiting:
            reason = f"{num_waiting} requests are waiting, the most allowed"
        elif self._max_wait_s is not None and self._wait_s() > self._max_wait_s:
            reason = f"The request would wait for longer than {self._max_wait_s:g} s"
        else:
            return
        raise CapacityError(reason, retry_after_s=retry_after_s())

    def _wait_s(self) -> float:
        """Return the predicted wait of a new request in seconds; 0 before the first step."""
        if self._free_at is None:
            self._free_at = self._play()
        num_steps = max(self._free_at[0] if self._free_at else 0, self._num_to_run // self._num_step_tokens)
        return num_steps * self._step_s

    def _play(self) -> list[int]:
        """Return the steps until each seat is free, when all that wait now have been served, as a heap."""
        running: list[int] = []
        waiting: list[int] = []
        self._num_to_run = 0
        for sequence in self._sequences.values():
            of = running if sequence.status is SequenceStatus.RUNNING else waiting
            of.append(self._num_left(sequence))
            self._num_to_run += sequence.num_to_run
        if not self._is_full():
            running += [0] * (self._num_seats - len(running))
        heapify(running)
        if running:
            for num_left in waiting:
                heapreplace(running, running[0] + num_left)
        return running

    def _num_left(self, sequence: Sequence) -> int:
        """Return the predicted number of tokens that an answer still lacks, at least one."""
        request_id, num_output = sequence.request.request_id, sequence.num_output_tokens
        length = self._lengths.get(request_id, 0)
        if length <= num_output:
            length = self._lengths[request_id] = self._predictor.predict(sequence).p50
        return max(1, length - num_output)
