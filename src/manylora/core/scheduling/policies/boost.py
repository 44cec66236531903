"""First come, first served, except that a small request is dated back: by more, the longer the line.

A request's key is ``arrival + backlog * log(size)``: a request smaller by a factor of e goes ahead of those that came
up to one backlog earlier. *Backlog* is the device time of the waiting prompts, in seconds. With a short line the order
is nearly the order of arrival. With a long line a small request passes nearly all larger requests, when that helps it
most and adds least to their wait.

Why this form: shortest first has the best mean and a long tail; order of arrival has nearly the best tail and a poor
mean. In between, arrival less ``log(1 / (1 - exp(-g * size))) / g``, where ``g`` is the decay rate of the tail, has the
shortest tail of all orders that know sizes which are not heavy-tailed, and a mean near the best. Near saturation
``1/g`` is the mean wait and sizes are small beside it, which leaves the logarithm. The backlog serves as the mean wait:
it is the wait of requests that arrive now, not of those that arrived before.

*Size* is a product, so that each factor shifts the key by itself: the device time of the prompt, because a first token
waits for prompts; the pages of the adapter; and, squared, Chameleon's weighted size, which includes the predicted
answer. A wrong prediction moves a request by a part of its key, and never into another queue.

No request starves, for the reasons in ``keyed.py``. The backlog that counts is bounded, so that the order does not
become shortest first under an overload that lasts.

Source: the key after Yu and Scully, "Strongly tail-optimal scheduling in the light-tailed M/G/1" (2024), the weighted
size after Chameleon, section 4.3.1; the backlog in place of a constant, and the bound, are ours
(``docs/scheduling.md``).
"""

from __future__ import annotations

from collections import deque
from math import log

from manylora.core.scheduling.policies.keyed import KeyedPolicy
from manylora.core.scheduling.policies.request_size import Demand, RequestSizer, SizeOptions
from manylora.core.scheduling.policy import Outcome, PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["BoostPolicy"]

SHORTEST_S, LONGEST_S = 0.05, 5.0  # the backlog that counts lies between these, in seconds

STALE = 1.25  # keys are computed again when the backlog has changed by this factor

FIRST_FIT_AFTER, WINDOW = 16, 2048
"""Sizes are scaled by the latest ``WINDOW`` requests: fitted each time their number doubles, then every ``WINDOW``."""


class BoostPolicy(KeyedPolicy):
    """Offers the first in line, then sequences by key; the size of a pre-empted sequence is the size of its rest."""

    Options = SizeOptions

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(self._measured)
        self._context = context
        self._sizer = RequestSizer(context.options.request_size)
        self._demands: deque[Demand] = deque(maxlen=WINDOW)
        self._num_arrivals = 0
        self._fit_after = FIRST_FIT_AFTER
        self._prompt_s: dict[int, float] = {}  # by seq_id, as the next
        self._log_size: dict[int, float] = {}
        self._backlog_s = 0.0
        self._scale_s = SHORTEST_S  # the backlog in the present keys

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        super().remove(sequence)
        self._forget(sequence)

    def begin(self, now: float) -> None:
        """Compute keys again if the backlog has changed, and name the first in line."""
        backlog_s = min(max(self._backlog_s, SHORTEST_S), LONGEST_S)
        if not 1 / STALE < backlog_s / self._scale_s < STALE:
            self._scale_s = backlog_s
            self.reorder(self._dated_back)
        super().begin(now)

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Continue, count the sequences that were passed, or stop."""
        super().report(sequence, outcome)
        if outcome is Outcome.ADMITTED:
            self._forget(sequence)

    def _measured(self, sequence: Sequence, now: float) -> float:
        """Measure a sequence that begins to wait, and return its key."""
        demand = self._demand(sequence)
        if sequence.admitted_at is None:
            self._learn(demand)
        prompt_s = self._context.prompt_s(sequence)
        self._prompt_s[sequence.seq_id] = prompt_s
        self._backlog_s += prompt_s
        size = prompt_s * max(1, sequence.num_adapter_pages) * self._sizer.size(demand) ** 2
        self._log_size[sequence.seq_id] = log(max(size, 1e-30))
        return self._dated_back(sequence)

    def _dated_back(self, sequence: Sequence) -> float:
        return sequence.arrived_at + self._scale_s * self._log_size[sequence.seq_id]

    def _demand(self, sequence: Sequence) -> Demand:
        output = self._context.predictor.predict(sequence).p50 - sequence.num_output_tokens
        adapter = sequence.num_adapter_pages * self._context.block_size
        return Demand(prompt=sequence.num_to_run, output=max(1, output), adapter=adapter)

    def _learn(self, demand: Demand) -> None:
        """Fit sizes to recent requests. Waiting requests keep their size: they will soon be gone."""
        self._demands.append(demand)
        self._num_arrivals += 1
        if self._num_arrivals == 1 or self._num_arrivals >= self._fit_after:
            self._sizer.fit(self._demands)
            self._fit_after = max(FIRST_FIT_AFTER, self._num_arrivals + min(self._num_arrivals, WINDOW))

    def _forget(self, sequence: Sequence) -> None:
        self._backlog_s -= self._prompt_s.pop(sequence.seq_id)
        del self._log_size[sequence.seq_id]
