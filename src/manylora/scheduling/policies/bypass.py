"""The bound on being passed, which every policy that lets requests pass shares.

A request that was offered and refused may be passed by younger ones, by no more than ``MAX_BYPASS`` admissions: after
that the policy lets none pass, running sequences end, and it gets its turn. Waiting for a load does not
count: it could not run anyway, and a load ends by itself.

Source: ours. S-LoRA, Punica and vLLM let a request starve at their adapter limit; Chameleon (section 4.3.3)
bounds bypassing by prediction alone, which bounds nothing when predictions are wrong.
"""

from __future__ import annotations

from manylora.scheduling.policy import Outcome
from manylora.scheduling.sequence import Sequence

__all__ = ["LOOK_AHEAD", "MAX_BYPASS", "Bypass"]

MAX_BYPASS = 64
LOOK_AHEAD = 256
"""Waiting sequences looked at in one step at most: bounds the cost of a step when thousands wait."""


class Bypass:
    """Remembers the refused ones, and counts younger sequences admitted since."""

    def __init__(self) -> None:
        self._refused: dict[int, Sequence] = {}

    @property
    def exhausted(self) -> Sequence | None:
        """The oldest that was passed as often as a sequence may be."""
        worn = [sequence for sequence in self._refused.values() if sequence.num_bypassed >= MAX_BYPASS]
        return min(worn, key=lambda sequence: sequence.seq_id, default=None)

    def refuse(self, sequence: Sequence) -> None:
        """A sequence could not be admitted: from here on it is passed."""
        self._refused[sequence.seq_id] = sequence

    def forgive(self, sequence: Sequence) -> None:
        """A sequence is on its way, or gone: none passes it any more."""
        self._refused.pop(sequence.seq_id, None)

    def admit(self, sequence: Sequence) -> bool:
        """A sequence was admitted; return whether one that it passed may not be passed again."""
        self.forgive(sequence)
        is_exhausted = False
        for older in self._refused.values():
            if older.seq_id < sequence.seq_id:
                older.passed()
                is_exhausted |= older.num_bypassed >= MAX_BYPASS
        return is_exhausted

    def report(self, sequence: Sequence, outcome: Outcome) -> bool:
        """Learn what became of an offer; return whether no other may be admitted in this step."""
        match outcome:
            case Outcome.ADMITTED:
                return self.admit(sequence)
            case Outcome.NO_PAGES:
                return True
            case Outcome.ADAPTER_LOADING:
                self.forgive(sequence)
                return False
        self.refuse(sequence)
        return sequence.num_bypassed >= MAX_BYPASS
