"""Predictors for experiments: one knows the true lengths, one adds noise of a chosen size to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from manylora.core.options import check_options, option
from manylora.core.scheduling.prediction.port import LengthEstimate, bounded_estimate
from manylora.core.scheduling.sequence import Sequence

__all__ = ["NoisyPredictor", "OraclePredictor"]


def _cap(sequence: Sequence) -> int:
    return sequence.max_tokens


class OraclePredictor:
    """Predicts the true length.

    Args:
        truth: Returns the length of a sequence's answer; by default its cap, the true length of requests that ignore
            end-of-sequence tokens.
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

    The factor is uniform in ``1 ± 2 (1 - accuracy)``, so the mean relative error is ``1 - accuracy`` and the mean
    estimate is unbiased. It depends on the seed and the sequence alone, not on the order of calls.

    Args:
        accuracy: In (0.5, 1].
        truth: As the oracle's. Estimates never exceed the cap, so where that is the truth, only those below err.

    Source: Chameleon, section 5.4.1, sets the accuracy to 100, 80 and 60 % without a definition of accuracy; this
    one is ours.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """The size of the noise."""

        accuracy: float = option(0.8, above=0.5, at_most=1, help="1 less the mean relative error; for experiments.")

        def __post_init__(self) -> None:
            check_options(self)

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
