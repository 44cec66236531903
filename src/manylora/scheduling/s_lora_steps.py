"""Steps as S-LoRA's public code makes them, for comparisons with published figures.

Source: S-LoRA's router and request queue; how each part maps to it is in ``docs/adr/0016``.
"""

from __future__ import annotations

from typing import TypeVar

from manylora.scheduling.step_composition import MixedSteps, WholePromptSteps

__all__ = ["ChunkedSLoraSteps", "SLoraSteps"]

T = TypeVar("T")


class SLoraSteps(WholePromptSteps):
    """Whole prompts in steps of their own, and a fixed number of decode steps between two admissions.

    A step waits for the adapters of the sequences it was about to admit, and nothing runs meanwhile. It cannot wait for
    ever: loads end, also by failing, and a round of admission ends with the seats or the step's tokens.

    Args:
        steps_between_admissions: Steps that run before others are admitted, while any sequence runs.
    """

    def __init__(self, steps_between_admissions: int = 10) -> None:
        self._gap = steps_between_admissions
        self._num_since_admission = steps_between_admissions
        self._is_held_back = False

    def beside_prompts(self, decodes: list[T]) -> list[T]:
        """Return none: decoding waits while prompts run."""
        return []

    def may_admit(self) -> bool:
        """After the gap, and again after each load that an admission waits for."""
        return self._is_held_back or self._num_since_admission >= self._gap

    def round_ended(self, *, has_admitted: bool, is_loading: bool) -> bool:
        """Hold the step back while an adapter is on its way."""
        if has_admitted:
            self._num_since_admission = -1  # the step about to be planned is theirs
        self._is_held_back = is_loading
        return is_loading

    def step_planned(self) -> None:
        """Count it."""
        self._num_since_admission += 1


class ChunkedSLoraSteps(MixedSteps):
    """As ``MixedSteps``, but a step waits for the adapters of the sequences it was about to admit, as S-LoRA's does."""

    def round_ended(self, *, has_admitted: bool, is_loading: bool) -> bool:
        """Hold the step back while an adapter is on its way."""
        return is_loading
