"""What a step is made of: how prompts share it with decoding, and when waiting sequences may join.

The running set asks one strategy, chosen by name (``SchedulerConfig.step_composition``). The default, ``mixed``, cuts
prompts to the room that decoding leaves and admits at every step, after Sarathi-Serve. The others make steps as
published baselines do, so that their figures can be compared on this engine (``docs/adr/0016``).

::

    mixed            | decodes | chunk | chunk |      prompts cut to the step
    whole-prompts    | decodes | prompt ........ |    the last prompt may overshoot the budget
    s-lora           | decodes |  or  | prompts ... |  prompts in steps of their own (``s_lora_steps.py``)
"""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["MixedSteps", "StepComposition", "WholePromptSteps"]

T = TypeVar("T")


class StepComposition(Protocol):
    """Decides what shares a step. It may keep state from step to step, and belongs to one engine."""

    def most_tokens(self, budget: int, longest: int) -> int:
        """Return the most tokens that a step can hold, for buffers and memory estimates.

        Args:
            budget: Tokens that a step should hold at most.
            longest: Tokens of the longest prompt.
        """
        ...

    def chunk(self, num_tokens: int, room: int) -> int:
        """Return how many tokens of a prompt run in the step.

        Args:
            num_tokens: Tokens of the prompt whose KV is missing.
            room: Those of them that the step has room for.
        """
        ...

    def beside_prompts(self, decodes: list[T]) -> list[T]:
        """Return the decoding sequences that run in a step with prompts; the others wait for the next step."""
        ...

    def may_admit(self) -> bool:
        """Whether waiting sequences may join a step that has work without them."""
        ...

    def round_ended(self, *, has_admitted: bool, is_loading: bool) -> bool:
        """Learn the outcome of a round of admission; return whether the step is held back for loads.

        Args:
            has_admitted: Some sequence was admitted.
            is_loading: Some sequence was not, because its adapter is on its way.
        """
        ...

    def step_planned(self) -> None:
        """Learn that a step was planned and was not held back."""
        ...


class MixedSteps:
    """Prompts, cut to the step, run beside decoding; sequences join at every step, and copies hide behind steps."""

    def most_tokens(self, budget: int, longest: int) -> int:
        """Return the budget."""
        return budget

    def chunk(self, num_tokens: int, room: int) -> int:
        """Return the room there is."""
        return room

    def beside_prompts(self, decodes: list[T]) -> list[T]:
        """Return all of them."""
        return decodes

    def may_admit(self) -> bool:
        """At every step."""
        return True

    def round_ended(self, *, has_admitted: bool, is_loading: bool) -> bool:
        """Never hold a step back."""
        return False

    def step_planned(self) -> None:
        """Nothing is kept from step to step."""


class WholePromptSteps(MixedSteps):
    """As ``MixedSteps``, but each prompt runs whole: a step is as long as its last prompt makes it."""

    def most_tokens(self, budget: int, longest: int) -> int:
        """Return the budget but for one token, and the longest prompt in its place."""
        return budget - 1 + longest

    def chunk(self, num_tokens: int, room: int) -> int:
        """Return all of the prompt."""
        return num_tokens
