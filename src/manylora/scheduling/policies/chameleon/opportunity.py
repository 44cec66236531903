"""Opportunistic bypass: which requests may pass one that lacks memory for its adapter, and when that is taken back.

Everything is counted in steps: a running request makes one token in each, so no clock is needed.

::

    older request needs 6 pages     |0 .. wait 30 steps .................|   two running ones end by then: 4 + 3 pages
    younger, 20 tokens to go        |-- 1 prompt step + 20 --|  passes
    younger, 40 tokens to go        |-- 1 prompt step + 40 --------------|--------|  does not

Source: Chameleon, section 4.3.3. It does not say which prediction is compared: we take the middle estimate of when
memory comes free, and the high one (p90) of how long the younger takes, so that few are squashed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from manylora.memory import num_blocks
from manylora.scheduling.policy import Nearness, PolicyContext
from manylora.scheduling.sequence import Sequence
from manylora.types import AdapterKey

__all__ = ["Opportunity", "Running", "steps_to_end"]


@dataclass(frozen=True, slots=True)
class Running:
    """A running request, as far as its memory is concerned.

    Args:
        sequence: The request.
        steps_left: Steps until it is expected to end.
    """

    sequence: Sequence
    steps_left: int


def steps_to_end(sequence: Sequence, total_output: int, max_num_batched_tokens: int) -> int:
    """Return the steps a request takes if admitted now: those of its prompt, then one per token still to come.

    The step that ends the prompt makes the first token.
    """
    prompt_steps = ceil(max(1, sequence.num_to_run) / max_num_batched_tokens)
    return prompt_steps - 1 + max(1, total_output - sequence.num_output_tokens)


class Opportunity:
    """Knows which adapters run, and answers the two questions: how long until there is room, and who must go for it.

    Args:
        context: Says what could be claimed, and where adapters are.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._users: dict[AdapterKey, int] = {}  # running requests per adapter: its pages come free with the last

    def is_used(self, key: AdapterKey | None) -> bool:
        """Whether a running request uses the adapter."""
        return key in self._users

    def admitted(self, sequence: Sequence) -> None:
        """A request starts to run."""
        if sequence.adapter is not None:
            self._users[sequence.adapter] = self._users.get(sequence.adapter, 0) + 1

    def stopped(self, sequence: Sequence) -> None:
        """A request ended or was sent back."""
        if sequence.adapter is not None:
            self._users[sequence.adapter] -= 1
            if not self._users[sequence.adapter]:
                del self._users[sequence.adapter]

    def steps_until_room(self, sequence: Sequence, running: Iterable[Running], *, is_first: bool) -> float:
        """Return in how many steps running requests will have given back what a waiting one lacks.

        Infinite if all of them do not suffice, or if it is not pages it lacks (but room on the host).
        """
        num_pages = self._pages_missing(sequence, is_first)
        if num_pages <= 0:
            return inf
        left = dict(self._users)
        for one in sorted(running, key=lambda one: one.steps_left):
            num_pages -= _own_pages(one.sequence) + _adapter_pages(one.sequence, left)
            if num_pages <= 0:
                return one.steps_left
        return inf

    def who_must_go(
        self, older: Sequence, num_tokens: int, passers: Iterable[tuple[Sequence, int]], *, is_first: bool
    ) -> list[Sequence]:
        """Return the fewest of those that passed whose pages and tokens, with what is free, let the older one run.

        Args:
            older: Waits.
            num_tokens: Tokens its queue lacks for it.
            passers: Running requests that passed it, and the tokens each holds.
            is_first: Whether the older is first in line. Adapters of those who go wait with them, so only then
                may it take their pages.

        Returns:
            The youngest first; none if all of them were not enough, or if it can run without.
        """
        if self._context.nearness(older) < Nearness.HOST:
            return []  # its adapter came after all
        num_pages = self._pages_missing(older, is_first)
        left = dict(self._users)
        chosen: list[Sequence] = []
        for passer, held_tokens in sorted(passers, key=lambda one: one[0].seq_id, reverse=True):
            if num_pages <= 0 and num_tokens <= 0:
                break
            chosen.append(passer)
            num_tokens -= held_tokens
            adapter_pages = _adapter_pages(passer, left)
            num_pages -= _own_pages(passer) + (adapter_pages if is_first else 0)
        return chosen if num_pages <= 0 and num_tokens <= 0 else []

    def _pages_missing(self, sequence: Sequence, is_first: bool) -> int:
        """Return the pages that its adapter and its tokens need and that it could not claim now."""
        needed = sequence.num_adapter_pages + num_blocks(sequence.num_tokens_to_hold, self._context.block_size)
        return needed - self._context.num_claimable_pages(is_first)

    def check_integrity(self, num_with_adapter: int) -> None:
        """Assert that so many running requests are accounted for."""
        assert sum(self._users.values()) == num_with_adapter


def _own_pages(sequence: Sequence) -> int:
    """Return the pages of KV that no other is likely to share: not those found in the prefix cache."""
    return max(0, len(sequence.table.pages) - sequence.num_shared_pages)


def _adapter_pages(sequence: Sequence, left: dict[AdapterKey, int]) -> int:
    """Return an adapter's pages if this is its last user; counts the user out."""
    key = sequence.adapter
    if key is None:
        return 0
    left[key] -= 1
    return sequence.num_adapter_pages if left[key] == 0 else 0
