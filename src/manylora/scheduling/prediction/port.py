"""The port for predicting how long an answer will be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from manylora.scheduling.sequence import Sequence

__all__ = ["LengthEstimate", "LengthPredictor", "bounded_estimate"]


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """How many tokens a request will have generated when it ends, in all.

    Args:
        p50: As likely more as less.
        p90: Less in nine cases of ten.
    """

    p50: int
    p90: int


class LengthPredictor(Protocol):
    """Guesses the length of answers, and learns from those that ended. Called on the loop's thread: be quick."""

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return an estimate, given what was generated so far: always more than that, never beyond the cap."""
        ...

    def observe(self, sequence: Sequence) -> None:
        """Learn from a sequence that ended by itself or at its cap; not told of cancelled ones."""
        ...


def bounded_estimate(sequence: Sequence, p50: float, p90: float) -> LengthEstimate:
    """Return an estimate within what is still possible: one token more at least, the sequence's cap at most."""
    least, most = min(sequence.num_output_tokens + 1, sequence.max_tokens), sequence.max_tokens
    middle = min(max(round(p50), least), most)
    return LengthEstimate(middle, min(max(round(p90), middle), most))
