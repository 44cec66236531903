"""The default predictor: quantiles of the adapter's own answers, and of all answers where it has few.

The adapter is the task, so its own history is the strongest feature there is, and it costs a dictionary lookup.
The histogram of an adapter is mixed with the global one at the weight of ``PRIOR_COUNT`` answers: a new adapter starts
from the global lengths, and a few dozen answers of its own outweigh them.

The estimate is conditional on the tokens generated so far, so asking again while a request runs refines it: among
answers that reached this length, half ended before p50.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp
from statistics import NormalDist

from manylora.scheduling.prediction.histogram import NUM_BINS, LengthHistogram, quantiles_beyond
from manylora.scheduling.prediction.port import LengthEstimate, bounded_estimate
from manylora.scheduling.sequence import Sequence

__all__ = ["QuantilePredictor"]

PRIOR_COUNT = 10.0
ADAPTER_MEMORY, GLOBAL_MEMORY = 200, 2000
MAX_HISTORIES = 20_000
"""Adapters remembered; beyond that the least recently used one is forgotten."""
CHAT_LOG_MEAN, CHAT_LOG_SIGMA = 5.019, 0.859
"""Lognormal of answer lengths in the Azure conversation trace: the prior before the first answer."""


class QuantilePredictor:
    """Keeps one histogram per adapter name and one of all; the base has a history like any adapter."""

    def __init__(self) -> None:
        self._global = LengthHistogram(GLOBAL_MEMORY)
        self._by_name: OrderedDict[str, LengthHistogram] = OrderedDict()
        chat = NormalDist(CHAT_LOG_MEAN, CHAT_LOG_SIGMA)
        for share in range(1, 20):
            self._global.add(round(exp(chat.inv_cdf(share / 20))), count=0.5)

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return the quantiles of answers at least as long as this one is so far."""
        ended, cut = [0.0] * NUM_BINS, [0.0] * NUM_BINS
        self._global.add_to(ended, cut, PRIOR_COUNT)
        own = self._by_name.get(sequence.name)
        if own is not None:
            own.add_to(ended, cut, own.count)
        p50, p90 = quantiles_beyond(ended, cut, sequence.num_output_tokens, (0.5, 0.9))
        cap = sequence.max_tokens
        return bounded_estimate(sequence, min(p50, cap), min(p90, cap))

    def observe(self, sequence: Sequence) -> None:
        """Add an answer's length."""
        num_tokens = sequence.num_output_tokens
        was_cut = num_tokens >= sequence.max_tokens
        self._global.add(num_tokens, was_cut=was_cut)
        own = self._by_name.get(sequence.name)
        if own is None:
            own = self._by_name[sequence.name] = LengthHistogram(ADAPTER_MEMORY)
            if len(self._by_name) > MAX_HISTORIES:
                self._by_name.popitem(last=False)
        self._by_name.move_to_end(sequence.name)
        own.add(num_tokens, was_cut=was_cut)
