"""The interface of length predictors; predictors for experiments, which know true lengths or err by a known size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from manylora.core.options import CheckedOptions, option
from manylora.core.scheduling.sequence import Sequence

__all__ = ["LengthEstimate", "LengthPredictor", "NoisyPredictor", "OraclePredictor", "bounded_estimate"]


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Quantiles of the tokens that a request will have generated when it ends."""

    p50: int
    p90: int


class LengthPredictor(Protocol):
    """Predicts the length of answers, and learns from those that ended. Runs on the loop's thread: be quick."""

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return an estimate, given the tokens generated so far: always more than those, never beyond the cap."""

    def observe(self, sequence: Sequence) -> None:
        """Learn from a sequence that ended by itself or at its cap, not from a cancelled sequence."""


def bounded_estimate(sequence: Sequence, p50: float, p90: float) -> LengthEstimate:
    """Return an estimate cut to the possible lengths: at least one token more, at most the sequence's cap."""
    least, most = min(sequence.num_output_tokens + 1, sequence.max_tokens), sequence.max_tokens
    middle = min(max(round(p50), least), most)
    return LengthEstimate(middle, min(max(round(p90), middle), most))


def _cap(sequence: Sequence) -> int:
    return sequence.max_tokens


class OraclePredictor:
    """Predicts the true length.

    By default that is the cap, the true length of requests that ignore end-of-sequence tokens.
    """

    def __init__(self, truth: Callable[[Sequence], int] = _cap) -> None:
        self._truth = truth

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return the true length."""
        truth = self._truth(sequence)
        return bounded_estimate(sequence, truth, truth)

    def observe(self, sequence: Sequence) -> None:
        """Nothing to learn."""


class NoisyPredictor:
    """Predicts the true length times a factor drawn once per request.

    The factor is uniform in ``1 ± 2 (1 - accuracy)``, so the mean relative error is ``1 - accuracy``, which is below
    0.5, and the mean estimate is unbiased. It depends only on the seed and the sequence, not on the order of calls. No
    estimate exceeds the cap; where that is the truth, only those below err.

    Source: Chameleon, section 5.4.1, sets the accuracy to 100, 80 and 60 % without a definition of accuracy; this one
    is ours.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options(CheckedOptions):
        """The size of the noise."""

        accuracy: float = option(0.8, above=0.5, at_most=1, help="1 less the mean relative error; for experiments.")

    def __init__(self, accuracy: float, seed: int, truth: Callable[[Sequence], int] = _cap) -> None:
        self._truth = truth
        self._spread = 2.0 * (1.0 - accuracy)
        self._seed = seed

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return the noisy length; p90 is the length that nine of ten true ones would not exceed."""
        # A hash rather than a generator, so that no state is kept per request.
        draw = crc32(f"{self._seed}/{sequence.seq_id}".encode()) / 0xFFFFFFFF
        guess = self._truth(sequence) * (1.0 + self._spread * (2.0 * draw - 1.0))
        return bounded_estimate(sequence, guess, guess / (1.0 - 0.8 * self._spread))

    def observe(self, sequence: Sequence) -> None:
        """Nothing to learn."""
