"""The default predictor: quantiles of the adapter's own answers, and of all answers where it has few.

The adapter is the task, so its own history is the strongest feature there is, and it costs a dictionary lookup. Lengths
are kept in decaying histograms, whose bins are a quarter of an octave wide: a quantile is within a tenth of the truth
from 1 token to a million. The histogram of an adapter is mixed with the global one at the weight of ``PRIOR_COUNT``
answers: a new adapter starts from the global lengths, and a few dozen answers of its own outweigh them.

An answer that ended at its cap was cut off: its length is *at least* that. Such answers count as at risk and not as
ended (the Kaplan-Meier estimator), so low caps of some requests do not make others look short.

::

    ended[b]     weight of answers that ended in bin b
    cut[b]       weight of answers cut off in bin b
    at risk(b)   all that reached bin b        hazard(b) = ended[b] / at risk(b)
    P(length beyond b | reached a) = product over a..b of (1 - hazard)

The estimate is conditional on the tokens generated so far, so asking again while a request runs refines it: among
answers that reached this length, half ended before p50.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log2
from statistics import NormalDist

from manylora.core.scheduling.prediction.predictor import LengthEstimate, bounded_estimate
from manylora.core.scheduling.sequence import Sequence

__all__ = ["NUM_BINS", "LengthHistogram", "QuantilePredictor", "bin_of", "quantiles_beyond", "upper_edge"]

BINS_PER_OCTAVE = 4
NUM_BINS = 80  # up to 2**20 tokens
RENORMALIZE_ABOVE = 1e12


def bin_of(num_tokens: int) -> int:
    """Return the bin of a length."""
    return min(int(log2(max(1, num_tokens)) * BINS_PER_OCTAVE + 1e-9), NUM_BINS - 1)


def upper_edge(index: int) -> float:
    """Return the length that bounds a bin from above."""
    return float(2.0 ** ((index + 1) / BINS_PER_OCTAVE))


class LengthHistogram:
    """Weights of lengths; old ones decay, so that roughly ``memory`` of them count. Updates take constant time."""

    __slots__ = ("_growth", "_total", "_weight", "cut", "ended")

    def __init__(self, memory: int) -> None:
        self._growth = 1.0 + 1.0 / memory
        self._weight = 1.0
        self._total = 0.0
        # Sparse: an adapter's answers fall into few bins, and there may be very many adapters.
        self.ended: dict[int, float] = {}
        self.cut: dict[int, float] = {}

    @property
    def count(self) -> float:
        """The number of lengths remembered, with old ones at their decayed weight."""
        return self._total / self._weight

    def add(self, num_tokens: int, *, was_cut: bool = False, count: float = 1.0) -> None:
        """Add the length of an answer ``count`` times; with ``was_cut`` the answer was longer than ``num_tokens``."""
        # Instead of decaying the old, new lengths weigh more; once in a while all are scaled down.
        self._weight *= self._growth
        side = self.cut if was_cut else self.ended
        index = bin_of(num_tokens)
        side[index] = side.get(index, 0.0) + self._weight * count
        self._total += self._weight * count
        if self._weight > RENORMALIZE_ABOVE:
            for bins in (self.ended, self.cut):
                for key in bins:
                    bins[key] /= self._weight
            self._total /= self._weight
            self._weight = 1.0

    def add_to(self, ended: list[float], cut: list[float], count: float) -> None:
        """Add the histogram's weights to dense bins, scaled to ``count`` lengths in sum."""
        if not self._total:
            return
        scale = count / self._total
        for index, weight in self.ended.items():
            ended[index] += weight * scale
        for index, weight in self.cut.items():
            cut[index] += weight * scale


def quantiles_beyond(
    ended: list[float], cut: list[float], num_reached: int, shares: tuple[float, ...]
) -> tuple[float, ...]:
    """Return the quantiles of length among answers that reached ``num_reached`` tokens, by the Kaplan-Meier estimator.

    Args:
        ended: Weight of answers that ended, by bin.
        cut: Weight of answers that were cut off, by bin.
        num_reached: Tokens generated so far.
        shares: The quantiles, in (0, 1), rising.

    Returns:
        Lengths in tokens; infinite where no answer has ended that late.
    """
    first = bin_of(num_reached)
    at_risk = sum(ended[first:]) + sum(cut[first:])
    surviving = 1.0
    found: list[float] = []
    for index in range(first, NUM_BINS):
        if at_risk <= 1e-9:
            break
        before = surviving
        surviving *= max(0.0, 1.0 - ended[index] / at_risk)
        at_risk -= ended[index] + cut[index]
        while len(found) < len(shares) and surviving <= 1.0 - shares[len(found)] + 1e-12:
            # Within the bin, as if ends were spread evenly over its logarithm.
            part = (before - (1.0 - shares[len(found)])) / (before - surviving)
            low = max(float(max(1, num_reached)), upper_edge(index - 1))
            found.append(low * (upper_edge(index) / low) ** part)
        if len(found) == len(shares):
            break
    return (*found, *[float("inf")] * (len(shares) - len(found)))


PRIOR_COUNT = 10.0
ADAPTER_MEMORY, GLOBAL_MEMORY = 200, 2000
MAX_HISTORIES = 20_000  # adapters remembered; beyond that the least recently used one is forgotten
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
