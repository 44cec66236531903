"""The budget of a step that is left for prompts: tokens and, if the step has a target duration, seconds.

::

    |-- decoding --|------------- prompts -------------|   a step
                   |-- chunk --|-- chunk --|  left ....|   until tokens or seconds are spent

Tokens alone make steps uneven: 512 tokens on adapters of rank 128 may take twice the time of as many at rank 8. A
target cuts prompts by time instead, so that the time between tokens is even and no step is shorter than necessary.

A long step serves prompts at the expense of decoding, and slow decodes hold pages longer. With pages to spare this
costs decoding speed alone; when pages run short it delays every admission. So the fuller the pool, the shorter the
steps.
"""

from __future__ import annotations

from manylora.core.costs.online import ONE_STEP, OnlineCosts, StepLoad
from manylora.core.scheduling import Sequence

__all__ = ["StepBudget", "target_s"]

ROOMY = 0.25
"""Share of claimable pages above which a step may use its whole target."""

LEAST_OF_TARGET = 0.3
"""Share of the target when no page is left: shorter steps would mostly read weights."""

PROMPT_SHARE = 0.2
"""Least share of a step for prompts, however many sequences decode: else prompts could starve on a slow device."""

LEAST_TOKENS = 16
"""Smallest chunk, in tokens."""


def target_s(longest_s: float, claimable_share: float) -> float:
    """Return the target duration of a step, in seconds.

    Args:
        longest_s: The target with pages to spare.
        claimable_share: Share of all pages that an admission could claim.
    """
    return longest_s * max(LEAST_OF_TARGET, min(1.0, claimable_share / ROOMY))


class StepBudget:
    """The tokens and seconds left for prompts.

    Args:
        num_tokens: Tokens left after decoding.
        decoding: The load of the sequences that decode in the same step.
        step_s: Target duration of the step in seconds; ``None`` for no target.
    """

    def __init__(
        self, num_tokens: int, costs: OnlineCosts, decoding: StepLoad = ONE_STEP, step_s: float | None = None
    ) -> None:
        self._num_tokens = num_tokens
        self._costs = costs
        self._seconds: float | None = None
        if step_s is not None:
            spent_s = costs.step_s(decoding)
            self._seconds = max(step_s - spent_s, PROMPT_SHARE * step_s, LEAST_TOKENS * costs.token_s(0))

    @property
    def is_spent(self) -> bool:
        """Whether less than the smallest chunk is left."""
        if self._num_tokens <= 0:
            return True
        return self._seconds is not None and self._seconds < LEAST_TOKENS * self._costs.token_s(0)

    def room_for(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens fit; at least one, unless the budget is spent."""
        num_tokens = min(sequence.num_to_run, self._num_tokens)
        if self._seconds is None:
            return num_tokens
        in_time = int(self._seconds / max(1e-9, self._costs.token_s(sequence.rank)))
        return min(num_tokens, max(LEAST_TOKENS, in_time))

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        """Subtract a chunk, which may exceed the room."""
        self._num_tokens -= num_tokens
        if self._seconds is not None:
            self._seconds -= num_tokens * self._costs.token_s(sequence.rank)
