"""The limits of the queue: the engine refuses at once a request that it would answer too late.

For the predicted wait of a request, the queue is played forward in steps. Each seat is free when its sequence has its
predicted tokens; each waiting sequence takes the seat that is free first; the new one gets the first seat after all of
them::

    tokens left     seat 0  ====                waits:  1st  until seat 1 is free
                    seat 1  ==                          2nd  until seat 0 is free
                    seat 2  =========                   new  until the 1st has ended on seat 1, or seat 2 is free

A mean rate would not do: a flood that meets an idle engine fills all seats at once, and none is free for the time of a
whole answer. All prompts before the new one take their steps as well. Lengths come from the engine's predictor; the
time of a step is the mean of the last steps.

Where lengths are not known, one guess for each would be too hopeful under overload: a request comes at every moment,
and is accepted at the one when the guesses happen to be the lowest. So an uncertain length counts as ``NUM_PARTS``
quantiles, each on a part of a seat, and a request waits until as many parts are free as make a seat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field
from heapq import heapify, heapreplace, nsmallest
from math import log, log2

from manylora.core.config import SchedulerConfig
from manylora.core.engine.steps.running import RunningSet
from manylora.core.errors import CapacityError
from manylora.core.scheduling import LengthPredictor, Policy, Sequence, SequenceStatus

__all__ = ["QueueWait", "num_starts", "play", "quantiles"]

WEIGHT = 1 / 16  # weight of the last step in the mean time of a step
FINISH_WINDOW = 64  # finished requests over which the rate of finishing is measured, for Retry-After

NUM_PARTS = 4

_DOUBLINGS = tuple(-log2(1 - (part + 0.5) / NUM_PARTS) for part in range(NUM_PARTS))
"""The middle quantile of each part of an exponential distribution, in medians."""

_P90 = log2(10)  # the 90 % quantile of that distribution, in medians


def quantiles(p50: int, p90: int) -> tuple[int, ...]:
    """Return the quantiles in the middle of each part of a Weibull distribution, rising; a single one if it is certain.

    ``p50`` and ``p90`` are its own, at least 1 and rising.
    """
    if p50 == p90:
        return (p50,)
    power = log(p90 / p50) / log(_P90)
    return tuple([max(1, round(p50 * doublings**power)) for doublings in _DOUBLINGS])


def play(running: Iterable[int], waiting: Iterable[int], num_free: int) -> list[int]:
    """Play the queue forward: return the steps until each seat is free of all who wait now, as a heap.

    ``running`` and ``waiting`` have the steps that each sequence has left, the latter in the order of their turns.
    """
    seats = [*running, *[0] * num_free]
    heapify(seats)
    if seats:
        for num_steps in waiting:
            heapreplace(seats, seats[0] + num_steps)
    return seats


def num_starts(seats: Seq[int], num_steps: int, length: int) -> int:
    """Return how many sequences of ``length`` steps would get a seat within ``num_steps``, one after another."""
    return sum([(num_steps - at) // length + 1 for at in seats if at <= num_steps])


@dataclass(eq=False)
class QueueWait:
    """Refuses requests beyond ``max_waiting`` and ``max_wait_s``; without the latter it predicts nothing."""

    scheduler: InitVar[SchedulerConfig]  # the limits of the queue, of a step, and of running sequences
    _predictor: LengthPredictor  # predicts the lengths of answers
    _sequences: Mapping[str, Sequence]  # all requests in flight, by id, in order of arrival
    _policy: Policy  # the waiting sequences
    _running: RunningSet  # knows whether a sequence waits for room although seats are free
    _step_s: float = 0.0
    _stepped_at: float = 0.0
    # Predicted, by request id: one, or a quantile for each part.
    _lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _free_at: list[int] | None = None  # a heap: steps until each part of a seat is free; none until asked for
    _num_to_run: int = 0  # tokens of prompts, and the next of each answer
    _sum_lengths: int = 0  # of the answers in flight

    def __post_init__(self, scheduler: SchedulerConfig) -> None:
        self._max_waiting = scheduler.max_waiting
        self._max_wait_s = scheduler.max_wait_s
        self.predicts = scheduler.max_wait_s is not None  # else it need not learn of steps
        self._num_step_tokens = scheduler.max_num_batched_tokens
        self._num_seats = min(scheduler.max_num_seqs, self._num_step_tokens)
        self._num_parts = 1  # of a seat
        self._finish_times: deque[float] = deque(maxlen=FINISH_WINDOW)

    def stepped(self, began_at: float, now: float) -> None:
        """Learn that a step ended; the time between two steps that follow each other is part of the second."""
        took_s = now - began_at
        if began_at - self._stepped_at < took_s:
            took_s = now - self._stepped_at
        self._step_s += (took_s - self._step_s) * (WEIGHT if self._step_s else 1.0)
        self._stepped_at = now
        self._free_at = None

    def added(self, sequence: Sequence) -> None:
        """Learn that a request was accepted."""
        seats = self._free_at
        if not seats:
            return
        lengths = self._left(sequence)
        if len(lengths) > self._num_parts:
            self._free_at = None
            return
        for num_left in lengths * (self._num_parts // len(lengths)):
            heapreplace(seats, seats[0] + num_left)
        self._num_to_run += sequence.num_to_run
        self._sum_lengths += lengths[len(lengths) // 2]

    def ended(self, sequence: Sequence, now: float) -> None:
        """Learn that a request ended, for any reason."""
        self._finish_times.append(now)
        if self._lengths.pop(sequence.request.request_id, None) is not None:
            self._free_at = None

    def has_room(self) -> bool:
        """Return whether a new request would be accepted now."""
        if len(self._policy) >= self._max_waiting:
            return False
        return self._max_wait_s is None or self._wait_s() <= self._max_wait_s

    def num_room(self) -> int:
        """Return how many requests with an answer of the mean length would be accepted now, one after another."""
        num = max(0, self._max_waiting - len(self._policy))
        if self._max_wait_s is None or not self._step_s:
            return num
        seats = self._played()
        num_steps = int(self._max_wait_s / self._step_s)
        if self._num_to_run // self._num_step_tokens > num_steps:
            return 0
        if not seats:
            return num
        mean_length = max(1, self._sum_lengths // max(1, len(self._sequences)))
        return min(num, num_starts(seats, num_steps, mean_length) // self._num_parts)

    def no_room(self, now: float) -> CapacityError:
        """Return the error of a request that is refused now."""
        num_waiting, num_finished = len(self._policy), len(self._finish_times)
        # The time from the end of one request to the next end, lately; a second before two have ended.
        every_s = (now - self._finish_times[0]) / num_finished if num_finished >= 2 else 1.0
        reason = f"{num_waiting} requests are waiting, the most allowed"
        if num_waiting < self._max_waiting and self._max_wait_s is not None:
            reason = f"The request would wait for longer than {self._max_wait_s:g} s"
        return CapacityError(reason, retry_after_s=min(60.0, every_s * num_waiting / 2), every_s=every_s)

    def _wait_s(self) -> float:
        """Return the predicted wait of a new request in seconds; 0 before the first step."""
        seats = self._played()
        first = nsmallest(self._num_parts, seats) if self._num_parts > 1 else seats[:1]
        return max(first[-1] if first else 0, self._num_to_run // self._num_step_tokens) * self._step_s

    def _played(self) -> list[int]:
        """Return the steps until each part of a seat is free, when all that wait now have been served, as a heap."""
        if self._free_at is not None:
            return self._free_at
        running: list[tuple[int, ...]] = []
        waiting: list[tuple[int, ...]] = []
        self._num_to_run = self._sum_lengths = 0
        for sequence in self._sequences.values():
            left = self._left(sequence)
            (running if sequence.status is SequenceStatus.RUNNING else waiting).append(left)
            self._num_to_run += sequence.num_to_run
            self._sum_lengths += left[len(left) // 2] + sequence.num_output_tokens
        num_free = 0 if self._running.is_full else self._num_seats - len(running)
        parts = self._num_parts = max(map(len, (*running, *waiting)), default=1)
        self._free_at = play(_in_parts(running, parts), _in_parts(waiting, parts), num_free * parts)
        return self._free_at

    def _left(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the tokens that an answer is predicted to lack still: one number, or ``quantiles``; at least 1."""
        request_id, num_output = sequence.request.request_id, sequence.num_output_tokens
        lengths = self._lengths.get(request_id)
        if lengths is None or lengths[0] <= num_output:
            estimate = self._predictor.predict(sequence)
            p50 = max(1, estimate.p50 - num_output)
            left = quantiles(p50, max(p50, estimate.p90 - num_output))
            self._lengths[request_id] = tuple([one + num_output for one in left])
            return left
        return tuple([one - num_output for one in lengths])


def _in_parts(lengths: Iterable[tuple[int, ...]], num_parts: int) -> list[int]:
    return [one for parts in lengths for one in (parts if len(parts) == num_parts else parts * num_parts)]
