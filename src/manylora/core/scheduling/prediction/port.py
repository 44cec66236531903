"""The interface of length predictors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from manylora.core.scheduling.sequence import Sequence

__all__ = ["LengthEstimate", "LengthPredictor", "bounded_estimate"]


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Quantiles of the tokens that a request will have generated when it ends."""

    p50: int
    p90: int


class LengthPredictor(Protocol):
    """Predicts the length of answers, and learns from those that ended. Runs on the loop's thread: be quick."""

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return an estimate, given the tokens generated so far: always more than those, never beyond the cap."""
        ...

    def observe(self, sequence: Sequence) -> None:
        """Learn from a sequence that ended by itself or at its cap, not from cancelled ones."""
        ...


def bounded_estimate(sequence: Sequence, p50: float, p90: float) -> LengthEstimate:
    """Return an estimate cut to the possible lengths: at least one token more, at most the sequence's cap."""
    least, most = min(sequence.num_output_tokens + 1, sequence.max_tokens), sequence.max_tokens
    middle = min(max(round(p50), least), most)
    return LengthEstimate(middle, min(max(round(p90), middle), most))
