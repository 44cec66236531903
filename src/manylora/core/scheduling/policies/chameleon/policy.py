"""Chameleon's scheduler: queues by size with token quotas, so that short requests have a fast lane.

::

    arrivals --size--> [ small  ] --own quota--\
                       [ medium ] --own quota---+--> running        pass 1: each queue up to its own quota
                       [ large  ] --own quota--/                    pass 2: the others share tokens of empty ones

A request is charged its prompt, its predicted answer and its adapter, in tokens, until it ends, and at least one
seat's share of the tokens. Tokens lent in pass 2 are charged to the empty queues and return to them. A request whose
demand exceeds its queue's whole quota is charged all of that quota: it waits until its queue holds nothing else.

A younger request passes one that lacks memory for its adapter only if it is predicted to end before that memory is
freed, and is squashed if the older could run after all (``opportunity.py``). While an adapter is loading, its request's
tokens are reserved and younger ones pass freely.

No request starves. A queue's quota returns as its running requests end, and its oldest takes it before any younger one;
an empty queue lends nothing once it has work. For memory, the oldest that has its quota is first in line: one without
could at most borrow, and no other may drop the adapters that waiting requests need. The oldest of a queue that has its
quota and is not admitted, for want of memory or because smaller requests took the seats, is passed a bounded number of
times (``policies/fifo.py``), then is first in line, and no other is offered. Squashing ends: only older requests
squash younger ones.

Source: Chameleon, section 4.3, algorithm 1. Our choices where it is silent are in ``docs/chameleon.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from manylora.core.options import option
from manylora.core.scheduling.policies.chameleon import queue_plan
from manylora.core.scheduling.policies.chameleon.opportunity import Opportunity, Running, steps_to_end
from manylora.core.scheduling.policies.chameleon.queue_plan import QueuePlan, RequestHistory, plan_queues, plan_static
from manylora.core.scheduling.policies.chameleon.quota import QuotaLedger
from manylora.core.scheduling.policies.fifo import LOOK_AHEAD, Bypass, Line
from manylora.core.scheduling.policies.request_size import Demand, RequestSizer, SizeOptions
from manylora.core.scheduling.policy import Outcome, Policy, PolicyContext, QueueStatus
from manylora.core.scheduling.sequence import Sequence

__all__ = ["ChameleonPolicy", "StaticQueuesPolicy"]


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    demand: Demand
    queue: int
    steps: int  # until it ends if admitted now, at p90
    total_output: int  # tokens it is expected to generate in all, at p50
    passed: list[Sequence] = field(default_factory=list)  # older ones of its queue that lacked adapter memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ChameleonOptions(SizeOptions):
    """The settings of queues and quotas."""

    queue_criterion: str = option(
        "elbow",
        panel="Scheduling",
        choices=("elbow", "wcss"),
        help="Under chameleon: criterion for the number of queues; elbow stops where another queue explains little "
        "more, wcss takes the least sum of squares (in practice always the most queues).",
    )
    refresh_s: float = option(
        300.0,
        panel="Scheduling",
        flag="--queue-refresh",
        unit="s",
        above=0,
        help="Under chameleon: time between two plans of queues and quotas.",
    )
    slo_s: float | None = option(
        None,
        panel="Scheduling",
        unit="s",
        above=0,
        help="Under chameleon: SLO of a request's duration, for quotas; by default five times the mean.",
    )


class ChameleonPolicy(Policy):
    """Queues by size, with cut-offs and quotas that follow the load."""

    Options = ChameleonOptions

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._config = context.config
        self._options: ChameleonOptions = context.options
        self._total = context.num_pages * context.block_size
        # A request is charged at least a seat's share of the tokens, so that small ones cannot take all seats.
        num_seats = min(context.config.max_num_seqs, context.config.max_num_batched_tokens)
        self._least = max(1, self._total // num_seats)
        self._history = RequestHistory()
        self._sizer = RequestSizer(self._options.request_size)
        self._plan = QueuePlan((), (self._total,))
        self._plan_after: float = queue_plan.FIRST_PLAN_AFTER  # arrivals
        self._plan_again_at = inf  # seconds
        self._lines = [Line()]
        self._ledger = QuotaLedger(self._plan.quotas)
        self._waiting: dict[int, _Entry] = {}  # by seq_id
        self._running: dict[int, _Entry] = {}  # by seq_id
        self._opportunity = Opportunity(context)
        self._bypass = Bypass()
        self._first: Sequence | None = None
        self._offers: Iterator[Sequence] = iter(())
        self._outcome = Outcome.NO_PAGES
        self._charging: tuple[int, list[int]] = (0, [])  # tokens of the sequence just offered, and the queues charged
        self._offered: set[int] = set()
        self._lacking: dict[
            int, list[tuple[Sequence, float]]
        ] = {}  # by queue: sequences without adapter memory, steps to wait

    def __len__(self) -> int:
        return len(self._waiting)

    # -- sequences come and go ---------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float) -> None:
        """Predict the length of the answer, and add the sequence to the queue for its size."""
        entry = self._measure(sequence)
        if sequence.admitted_at is None:
            self._history.arrived(entry.demand, now)
        self._waiting[sequence.seq_id] = entry
        self._lines[entry.queue].add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        self._take_out(sequence)
        self._bypass.forgive(sequence)

    def finish(self, sequence: Sequence, now: float) -> None:
        """Release the quota of an ended sequence, and record how long it ran."""
        demand, held_tokens = self._stop(sequence)
        assert sequence.admitted_at is not None
        self._history.ended(demand, held_tokens, now - sequence.admitted_at)

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Release the quota of a pre-empted sequence and let it wait in its old place."""
        self._stop(sequence)
        self.add(sequence, now)

    def _stop(self, sequence: Sequence) -> tuple[Demand, int]:
        entry = self._running.pop(sequence.seq_id)
        self._opportunity.stopped(sequence)
        return entry.demand, self._ledger.release(sequence.seq_id)

    def _take_out(self, sequence: Sequence) -> _Entry:
        entry = self._waiting.pop(sequence.seq_id)
        self._lines[entry.queue].remove(sequence)
        return entry

    def _measure(self, sequence: Sequence) -> _Entry:
        estimate = self._context.predictor.predict(sequence)
        demand = Demand(
            prompt=sequence.num_prompt_tokens,
            output=estimate.p50,
            adapter=sequence.num_adapter_pages * self._context.block_size,
        )
        queue = self._plan.queue_of(self._sizer.size(demand))
        steps = steps_to_end(sequence, estimate.p90, self._config.max_num_batched_tokens)
        return _Entry(sequence, demand, queue, steps, estimate.p50)

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Plan the queues again if it is time, and name the first in line."""
        num_arrivals = self._history.num_arrivals
        if num_arrivals >= self._plan_after or (now >= self._plan_again_at and num_arrivals):
            self._settle(now)
        ready = self._ready()
        for head in ready:
            # It counts as passed also if the seats or the step's tokens run out before it is offered.
            self._bypass.refuse(head)
        self._first = self._first_of(ready)
        self._offered.clear()
        self._lacking = {}
        exhausted = self._bypass.exhausted
        self._offers = self._two_passes() if exhausted is None else self._alone(exhausted)

    @property
    def first_in_line(self) -> Sequence | None:
        """The oldest that was passed too often, else the oldest that has its quota, else the oldest."""
        return self._first

    def offer(self) -> Sequence | None:
        """Return the next sequence of the two passes."""
        sequence = next(self._offers, None)
        if sequence is not None:
            self._offered.add(sequence.seq_id)
        return sequence

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Continue the passes."""
        self._outcome = outcome
        if outcome is Outcome.ADMITTED:
            entry = self._running[sequence.seq_id] = self._take_out(sequence)
            self._ledger.charge(sequence.seq_id, *self._charging)
            self._opportunity.admitted(sequence)
            entry.passed = [older for older, _ in self._lacking.get(entry.queue, ()) if older.seq_id < sequence.seq_id]
            if self._bypass.admit(sequence):
                self._offers = iter(())
        elif outcome is Outcome.ADAPTER_LOADING:
            self._bypass.forgive(sequence)
        else:
            self._bypass.refuse(sequence)

    def _heads(self) -> list[Sequence]:
        return [head for line in self._lines if (head := line.head) is not None]

    def _ready(self, granted: Sequence | None = None) -> list[Sequence]:
        """Return the oldest of each queue that has its quota, as if ``granted`` had it."""
        return [head for head in self._heads() if head is granted or self._has_quota(head)]

    def _first_of(self, ready: list[Sequence]) -> Sequence | None:
        return self._bypass.exhausted or min(ready or self._heads(), key=lambda head: head.seq_id, default=None)

    def _alone(self, sequence: Sequence) -> Iterator[Sequence]:
        """Offer only one that was passed too often, once its queue's quota allows."""
        if self._has_quota(sequence):
            entry = self._waiting[sequence.seq_id]
            self._charging = self._charge(entry), [entry.queue]
            yield sequence

    def _two_passes(self) -> Iterator[Sequence]:
        """Offer within own quotas, then within the tokens that empty queues lend; small requests first in both."""
        for queue in range(len(self._lines)):
            yield from self._put_batch(queue, [queue])
        empty = [queue for queue, line in enumerate(self._lines) if not line]
        for queue, line in enumerate(self._lines):
            if not self._ledger.free(empty):
                break
            if line:
                yield from self._put_batch(queue, empty)

    def _put_batch(self, queue: int, lenders: list[int]) -> Iterator[Sequence]:
        """Offer a queue's sequences, oldest first, as long as the lenders have the tokens."""
        reserved = 0  # for sequences of this batch whose adapter is loading
        lacking = self._lacking.setdefault(queue, [])
        for sequence in self._lines[queue].oldest(LOOK_AHEAD):
            if sequence.seq_id in self._offered:
                continue
            entry = self._waiting[sequence.seq_id]
            tokens = self._charge(entry)
            if tokens > self._ledger.free(lenders) - reserved:
                return
            if any(entry.steps > wait for _, wait in lacking):
                continue
            self._charging = tokens, lenders
            yield sequence
            match self._outcome:
                case Outcome.ADAPTER_LOADING:
                    reserved += tokens
                case Outcome.ADAPTER_NO_PAGES:
                    lacking.append((sequence, self._steps_until_room(sequence)))
                case Outcome.NO_PAGES:
                    lacking.append((sequence, 0))  # none of this queue passes it, in either pass
                    return

    def _has_quota(self, sequence: Sequence) -> bool:
        entry = self._waiting[sequence.seq_id]
        return self._charge(entry) <= self._ledger.free([entry.queue])

    def _charge(self, entry: _Entry) -> int:
        """Return the tokens an admission would hold; an adapter in use is charged to other requests already."""
        tokens = entry.demand.tokens
        if self._opportunity.is_used(entry.sequence.adapter):
            tokens -= entry.demand.adapter
        return min(max(tokens, self._least), self._ledger.quotas[entry.queue])

    # -- opportunistic bypass ----------------------------------------------------------------------------------------

    def squash(self, now: float) -> list[Sequence]:
        """Name running sequences to pre-empt for an older sequence that they bypassed, the youngest first.

        They are the fewest whose memory lets the older sequence run; none are named if that would not.
        """
        passers: dict[int, list[tuple[Sequence, int]]] = {}  # by seq_id of the older one
        for seq_id, entry in self._running.items():
            for older in entry.passed:
                if older.seq_id in self._waiting:
                    passers.setdefault(older.seq_id, []).append((entry.sequence, self._ledger.held_by(seq_id)))
        for seq_id in sorted(passers):
            waiting = self._waiting[seq_id]
            num_tokens = self._charge(waiting) - self._ledger.free([waiting.queue])
            is_first = waiting.sequence is self._first_of(self._ready(granted=waiting.sequence))
            squashed = self._opportunity.to_squash(waiting.sequence, num_tokens, passers[seq_id], is_first=is_first)
            if squashed:
                return squashed
        return []

    def _steps_until_room(self, sequence: Sequence) -> float:
        """Return the steps until memory for its adapter is free, by the p50 estimates."""
        running = []
        for entry in self._running.values():
            if entry.sequence.num_output_tokens >= entry.total_output:
                entry.total_output = self._context.predictor.predict(entry.sequence).p50
            steps_left = steps_to_end(entry.sequence, entry.total_output, self._config.max_num_batched_tokens)
            running.append(Running(entry.sequence, steps_left))
        return self._opportunity.steps_until_room(sequence, running, is_first=sequence is self._first)

    # -- queues ------------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Plan the queues by recent requests, and move every sequence to its new queue."""
        if now >= self._plan_again_at or self._plan_again_at == inf:
            self._plan_again_at = now + self._options.refresh_s
        self._plan_after = 2 * self._history.num_arrivals
        self._sizer.fit(demand for _, demand in self._history.arrivals)
        self._plan = self._make_plan(now)
        old = self._ledger
        self._ledger = QuotaLedger(self._plan.quotas)
        self._lines = [Line() for _ in self._plan.quotas]
        for entry in [*self._waiting.values(), *self._running.values()]:
            entry.queue = self._plan.queue_of(self._sizer.size(entry.demand))
        for seq_id in sorted(self._waiting):
            self._lines[self._waiting[seq_id].queue].add(self._waiting[seq_id].sequence)
        for seq_id, entry in self._running.items():
            self._ledger.carry_over(seq_id, old.held_by(seq_id), entry.queue)

    def _make_plan(self, now: float) -> QueuePlan:
        return plan_queues(
            self._history,
            self._sizer,
            criterion=self._options.queue_criterion,
            total=self._total,
            least=self._least,
            slo_s=self._options.slo_s,
            now=now,
        )

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the first in line and the oldest of each queue in turn, small ones first."""
        first = self._first_of(self._ready())
        found = [] if first is None else [first]
        fronts = [line.oldest(count) for line in self._lines]
        for place in range(count):
            found += [front[place] for front in fronts if place < len(front) and front[place] is not first]
            if len(found) >= count:
                break
        return found[:count]

    def queues(self) -> tuple[QueueStatus, ...]:
        """Return the queues with cut-offs and quotas."""
        num_running = [0] * len(self._lines)
        for entry in self._running.values():
            num_running[entry.queue] += 1
        return tuple(
            QueueStatus(
                num_waiting=len(line),
                num_running=num_running[queue],
                below=below,
                quota_tokens=self._ledger.quotas[queue],
                used_tokens=self._ledger.used(queue),
            )
            for queue, (line, below) in enumerate(zip(self._lines, (*self._plan.cut_offs, None), strict=True))
        )

    def check_integrity(self) -> None:
        """Assert that quotas and lines agree with the waiting and running sequences; slow, for tests."""
        self._ledger.check_integrity()
        assert self._ledger.num_loans == len(self._running)
        assert sum(map(len, self._lines)) == len(self._waiting)
        for entry in self._waiting.values():
            assert entry.queue == self._plan.queue_of(self._sizer.size(entry.demand))
        self._opportunity.check_integrity(sum(entry.demand.adapter > 0 for entry in self._running.values()))


class StaticQueuesPolicy(ChameleonPolicy):
    """The same passes over four queues of equal ranges and equal quotas, planned once.

    Source: the baseline "Static" of Chameleon, section 5.4.5, which knows the smallest and the largest size; here
    they are taken from the first hundred requests.
    """

    def _make_plan(self, now: float) -> QueuePlan:
        self._plan_again_at = self._plan_after = inf
        return plan_static(self._history, self._sizer, total=self._total, least=self._least)
