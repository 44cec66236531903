"""The composition of steps: how prompts share a step with decoding, and when waiting sequences may join.

The running set asks one strategy, chosen by name (``SchedulerConfig.step_composition``). The default, ``mixed``, cuts
prompts to the room that decoding leaves and admits at every step, after Sarathi-Serve. The others compose steps as
published baselines do, so that their figures can be compared on this engine. ``docs/baselines.md`` maps each
part of S-LoRA's router and request queue to an option.

::

    mixed            | decodes | chunk | chunk |      prompts cut to the step
    whole-prompts    | decodes | prompt ........ |    the last prompt may overshoot the budget
    separate-prompts | decodes |  or  | prompts ... |  prompts in steps of their own
    s-lora           as separate-prompts, and the step waits for the adapters of the sequences that it admits
"""

from __future__ import annotations

import sys
from typing import Protocol, TypeVar

__all__ = [
    "ChunkedSLoraSteps",
    "MixedSteps",
    "SLoraSteps",
    "SeparatePromptSteps",
    "StepComposition",
    "WholePromptSteps",
]

T = TypeVar("T")

ALL = sys.maxsize


class StepComposition(Protocol):
    """Decides which sequences share a step. It may keep state from step to step, and belongs to one engine.

    A class that inherits from it composes as ``mixed`` does, in all that it does not define.
    """

    def most_tokens(self, budget: int, longest: int) -> int:
        """Return the most tokens of a step that should hold ``budget``; the longest prompt has ``longest``."""
        return budget

    def chunk(self, num_tokens: int, room: int) -> int:
        """Return how many of a prompt's ``num_tokens`` without KV run in the step, which has ``room`` for so many."""
        return room

    def beside_prompts(self, decodes: list[T]) -> list[T]:
        """Return the decoding sequences that run in a step with prompts; the others wait for the next step."""
        return decodes

    def may_admit(self) -> bool:
        """Whether waiting sequences may join a step that has work without them."""
        return True

    def round_ended(self, *, has_admitted: bool, is_loading: bool) -> bool:
        """Learn the outcome of a round of admission; return whether the step is held back for loads.

        ``is_loading`` says that a sequence was not admitted because its adapter is loading.
        """
        return False

    def step_planned(self) -> None:
        """Learn that a step was planned and was not held back."""
        return

    def most_prefetches(self) -> int:
        """Return how many loads for waiting sequences an idle link may begin beside the step just planned.

        One, so that a load demanded later waits for at most one copy.
        """
        return 1


class MixedSteps(StepComposition):
    """Prompts, cut to the step, run beside decoding; sequences join at every step, and copies overlap with steps."""


class WholePromptSteps(MixedSteps):
    """Mixed steps in which each prompt runs whole: the last one may overshoot the budget."""

    def most_tokens(self, budget: int, longest: int) -> int:
        """Return ``budget - 1 + longest``: a whole prompt is admitted while one token of the budget is left."""
        return budget - 1 + longest

    def chunk(self, num_tokens: int, room: int) -> int:
        """Return ``num_tokens``: a prompt is never cut."""
        return num_tokens


class SeparatePromptSteps(WholePromptSteps):
    """Whole prompts in steps of their own, admitted at every step, while loads hold nothing back, as in CaraServe."""

    def beside_prompts(self, decodes: list[T]) -> list[T]:
        """Return none: decoding waits while prompts run."""
        return []


class SLoraSteps(SeparatePromptSteps):
    """Whole prompts in steps of their own, and a fixed number of decode steps between two admissions, as in S-LoRA.

    A step waits for the adapters of the sequences it was about to admit, and nothing runs meanwhile. The wait ends:
    loads complete or fail, and a round of admission ends with the seats or the step's tokens.

    In the decode steps ``prefetch_steps`` since the last admission, the adapters of waiting sequences are loaded, all
    at once, as by S-LoRA's ``--prefetch`` (which is off by default); with ``None`` by the engine's own rule, one at a
    time whenever the link is idle.
    """

    def __init__(self, steps_between_admissions: int = 10, prefetch_steps: tuple[int, ...] | None = None) -> None:
        self._gap = steps_between_admissions
        self._prefetch_steps = prefetch_steps
        self._num_since_admission = steps_between_admissions
        self._is_held_back = False

    def may_admit(self) -> bool:
        """Admit after the gap, and again after each load that an admission waits for."""
        return self._is_held_back or self._num_since_admission >= self._gap

    def round_ended(self, *, has_admitted: bool, is_loading: bool) -> bool:
        """Hold the step back while an adapter is loading."""
        if has_admitted:
            self._num_since_admission = -1  # the step about to be planned is the prompts' own
        self._is_held_back = is_loading
        return is_loading

    def step_planned(self) -> None:
        """Count it."""
        self._num_since_admission += 1

    def most_prefetches(self) -> int:
        """Begin all beside the steps of prefetching, or one beside any."""
        if self._prefetch_steps is None:
            return 1
        return ALL if self._num_since_admission in self._prefetch_steps else 0


class ChunkedSLoraSteps(MixedSteps):
    """Mixed steps that wait for the adapters of the sequences that they were about to admit, as S-LoRA's do."""

    def round_ended(self, *, has_admitted: bool, is_loading: bool) -> bool:
        """Hold the step back while an adapter is loading."""
        return is_loading
