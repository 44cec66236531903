"""A replica as a router sees it: the requests that were sent there, corrected by the replica's reports.

::

    dispatched --add--> waiting (its prompt is still to run) --started--> decoding --ended--> gone
    report: adapters on the device, room for KV, requests of other routers, step-time model

Counts of requests are the router's own: they are exact at every moment, for an engine in a simulator, in a process or
behind HTTP. A report is about the past. It gives facts that a router cannot count, and a replica that never reports is
described only by its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from manylora.core.costs.rank_fit import model_of
from manylora.core.costs.step_model import PRIOR, StepModel
from manylora.core.engine.status import EngineStats

__all__ = ["AnswerLengths", "ReplicaReport", "ReplicaView", "Sent", "StepTimes"]

MEAN_ANSWER_TOKENS = 200.0  # length of an answer before any answer has ended

MEMORY = 1000.0  # answers over which their mean length is taken
PRIOR_ANSWERS = 4.0  # weight of the assumed mean length, in answers

MOST_BELIEVED = 4096  # adapters that are believed to be on one device; the oldest are forgotten first


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's own account; ``None`` where it does not say."""

    num_requests: int | None = None  # requests that run or wait, of every router
    kv_tokens: int | None = None  # tokens of KV for which it has room beside the adapters in use
    resident: Iterable[str] | None = None  # names of the adapters on its device
    steps: StepModel | None = None  # its step-time model
    num_answers: int = 0  # requests that have ended with an answer, since its start
    num_answer_tokens: int = 0  # their tokens
    # Requests that wait for a seat or for memory, where the router does not know the number of seats.
    num_queued: int | None = None
    kv_usage: float | None = None  # share of KV memory in use, 0 to 1, where it does not know their size

    @classmethod
    def of(cls, stats: EngineStats, block_size: int) -> ReplicaReport:
        """Return the report of an engine with these counters."""
        in_use = stats.num_adapter_pages * stats.num_active // max(1, stats.num_resident)
        return cls(
            num_requests=stats.num_running + stats.num_waiting,
            kv_tokens=(stats.num_pages - in_use) * block_size,
            resident=stats.resident_adapters,
            steps=model_of(stats.fits),
            num_answers=stats.num_answers,
            num_answer_tokens=stats.num_answer_tokens,
        )


@dataclass(slots=True)
class Sent:
    """A request that was sent to a replica and has not ended."""

    replica: int  # its index
    adapter: str | None  # name of the adapter; ``None`` for the base, and for names that no replica knows
    rank: int  # rank of the adapter; 0 without one
    num_prompt_tokens: int  # tokens of the prompt
    num_cached_tokens: int = 0  # of these, the tokens that the replica's prefix cache was expected to hold
    has_started: bool = False  # whether its first token has come

    @property
    def num_run_tokens(self) -> int:
        """Tokens of the prompt that steps must run."""
        return self.num_prompt_tokens - self.num_cached_tokens


class StepTimes(NamedTuple):
    """The steps of a replica as its model predicts them, and the content that the prediction is from."""

    decode_s: float  # a decode step of all requests in flight, in seconds
    next_s: float  # the next step, in seconds: with the prompts that wait, or a decode step
    # Mean delay of a token by prompts that run beside it, in seconds. In a steady state as many prompts arrive during
    # an answer as requests are in flight.
    stall_s: float
    context: float  # tokens of KV that the requests in flight have
    num_rows: int  # tokens in the next step
    num_adapted_rows: float  # of these, the tokens of sequences with an adapter
    row_rank: float  # sum of their ranks


@dataclass(slots=True, eq=False)
class ReplicaView:
    """The requests in flight at one replica, and its last report.

    ``num_requests``, ``num_prompt_tokens``, ``sum_rank``, ``max_rank`` and ``ranks`` (requests by rank; the base is
    rank 0) are over all requests in flight, ``adapters`` counts them by adapter. ``num_waiting`` and ``waiting_tokens``
    are those whose first token has not come, ``waiting_row_rank`` the sum of ranks over their tokens. ``num_foreign``
    are requests of other routers, by report. ``resident`` are the adapters believed to be on the device.
    ``num_cached_tokens`` are the prompt tokens of requests in flight that the prefix cache was expected to hold, and
    ``cached_tokens`` those of the request that is being placed. ``num_queued`` and ``kv_usage`` are as reported, and
    ``load_then`` is the load at that time. ``num_answers`` and ``num_answer_tokens`` are as reported last.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    waiting_row_rank: int = 0
    sum_rank: int = 0
    max_rank: int = 0
    ranks: Counter[int] = field(default_factory=Counter)
    adapters: Counter[str] = field(default_factory=Counter)
    resident: dict[str, None] = field(default_factory=dict)  # in order of use
    num_foreign: int = 0
    cached_tokens: int = 0
    kv_tokens: int | None = None
    num_queued: int | None = None
    kv_usage: float | None = None
    load_then: int = 0
    num_answers: int = 0
    num_answer_tokens: int = 0
    steps: StepModel = PRIOR
    is_guessed: bool = True  # its step-time model is the prior, or another replica's
    mean_answer_tokens: float = MEAN_ANSWER_TOKENS
    _times: StepTimes | None = None  # of the present counts
    _most_sent: int = 0  # requests in flight at once since the last report

    @property
    def load(self) -> int:
        """Requests in flight on the replica, including requests that other routers sent."""
        return self.num_requests + self.num_foreign

    @property
    def num_adapted(self) -> int:
        """Requests in flight with an adapter."""
        return self.num_requests - self.ranks[0]

    def times(self) -> StepTimes:
        """Return the predicted steps, computed once per change of the view."""
        if self._times is None:
            self._times = self._predict()
        return self._times

    def _predict(self) -> StepTimes:
        steps, load, adapted, max_rank = self.steps, self.load, self.num_adapted, self.max_rank
        # Answers are half done on average.
        context = self.num_prompt_tokens + self.num_requests * self.mean_answer_tokens / 2
        decode_s = next_s = steps.decode_s(load, context, adapted, self.sum_rank, max_rank)
        num_rows, stall_s = load, 0.0
        adapted_rows, row_rank = float(adapted), float(self.sum_rank)
        if self.num_requests:
            share, mean_rank = adapted / self.num_requests, self.sum_rank / self.num_requests
            prompt = self.num_prompt_tokens / self.num_requests
            run = prompt - self.num_cached_tokens / self.num_requests
            prompt_s = steps.prefill_s(
                load + run, context + prompt, adapted + share * run, self.sum_rank + mean_rank * run, max_rank
            )
            stall_s = max(0.0, prompt_s - decode_s) * load / self.mean_answer_tokens
            if self.waiting_tokens:
                decodes = load - self.num_waiting
                num_rows = decodes + self.waiting_tokens
                adapted_rows = num_rows * share
                row_rank = decodes * mean_rank + self.waiting_row_rank
                next_s = steps.prefill_s(num_rows, context, adapted_rows, row_rank, max_rank)
        return StepTimes(decode_s, next_s, stall_s, context, num_rows, adapted_rows, row_rank)

    def add(self, sent: Sent) -> None:
        """Count a request in."""
        rank = sent.rank
        self._times = None
        self.num_requests += 1
        self.num_prompt_tokens += sent.num_prompt_tokens
        self.num_cached_tokens += sent.num_cached_tokens
        self.num_waiting += 1
        self.waiting_tokens += sent.num_run_tokens
        self.waiting_row_rank += sent.num_run_tokens * rank
        self.sum_rank += rank
        self.ranks[rank] += 1
        self.max_rank = max(self.max_rank, rank)
        self._most_sent = max(self._most_sent, self.num_requests)
        if sent.adapter is not None:
            self.adapters[sent.adapter] += 1
            self.resident.pop(sent.adapter, None)
            self.resident[sent.adapter] = None
            if len(self.resident) > MOST_BELIEVED:
                del self.resident[next(iter(self.resident))]

    def start(self, sent: Sent) -> None:
        """Count a prompt as run."""
        if not sent.has_started:
            sent.has_started = True
            self._times = None
            self.num_waiting -= 1
            self.waiting_tokens -= sent.num_run_tokens
            self.waiting_row_rank -= sent.num_run_tokens * sent.rank

    def remove(self, sent: Sent) -> None:
        """Count a request out."""
        self.start(sent)
        self._times = None
        rank = sent.rank
        self.num_requests -= 1
        self.num_prompt_tokens -= sent.num_prompt_tokens
        self.num_cached_tokens -= sent.num_cached_tokens
        self.sum_rank -= rank
        self.ranks[rank] -= 1
        if not self.ranks[rank]:
            del self.ranks[rank]
            self.max_rank = max(self.ranks, default=0)
        if sent.adapter is not None:
            self.adapters[sent.adapter] -= 1
            if not self.adapters[sent.adapter]:
                del self.adapters[sent.adapter]

    def learn(self, report: ReplicaReport) -> None:
        """Take over a report.

        The report was true at some moment since the last one, so only requests beyond the most that were in flight
        since then came from other routers. Adapters of requests in flight stay believed: their copies may be under way.
        """
        self._times = None
        if report.num_requests is not None:
            self.num_foreign = max(0, report.num_requests - self._most_sent)
        self._most_sent = self.num_requests
        self.kv_tokens = report.kv_tokens
        self.num_queued, self.kv_usage, self.load_then = report.num_queued, report.kv_usage, self.load
        if report.resident is not None:
            reported = dict.fromkeys(report.resident)
            known = [name for name in self.resident if name in reported or name in self.adapters]
            self.resident = reported | dict.fromkeys(self.adapters)
            for name in known:  # in the old order of use, behind those that others asked for
                self.resident.pop(name, None)
                self.resident[name] = None
        if report.steps is not None:
            self.steps, self.is_guessed = report.steps, False

    def guess(self, steps: StepModel | None, mean_answer_tokens: float) -> None:
        """Take over figures of other replicas: a step-time model, until this one has its own, and the answers."""
        self._times = None
        self.mean_answer_tokens = max(1.0, mean_answer_tokens)
        if steps is not None and self.is_guessed:
            self.steps = steps

    def forget(self) -> None:
        """Assume that the device holds the adapters of requests in flight and no others; counters begin anew."""
        self.resident = dict.fromkeys(self.adapters)
        self.num_answers = self.num_answer_tokens = 0


class AnswerLengths:
    """The ``mean`` length of answers, over all replicas, by their counters."""

    def __init__(self) -> None:
        self._num_answers = PRIOR_ANSWERS
        self._num_tokens = PRIOR_ANSWERS * MEAN_ANSWER_TOKENS

    @property
    def mean(self) -> float:
        """Tokens of an answer."""
        return self._num_tokens / self._num_answers

    def count(self, view: ReplicaView, report: ReplicaReport) -> None:
        """Learn the answers that a replica has given since its last report."""
        answers, tokens = view.num_answers, view.num_answer_tokens
        view.num_answers, view.num_answer_tokens = report.num_answers, report.num_answer_tokens
        if report.num_answers <= answers:  # none, or its counters began again
            return
        self._num_answers += report.num_answers - answers
        self._num_tokens += max(0, report.num_answer_tokens - tokens)
        if self._num_answers > MEMORY:
            self._num_tokens *= MEMORY / self._num_answers
            self._num_answers = MEMORY
