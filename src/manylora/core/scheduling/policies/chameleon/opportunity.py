"""Opportunistic bypass: which requests may pass one that lacks memory for its adapter, and when they are squashed.

Time is counted in steps: a running request makes one token in each, so no clock is needed.

::

    older request needs 6 pages     |0 .. wait 30 steps .................|   two running ones end by then: 4 + 3 pages
    younger, 20 tokens to go        |-- 1 prompt step + 20 --|  passes
    younger, 40 tokens to go        |-- 1 prompt step + 40 --------------|--------|  does not

Source: Chameleon, section 4.3.3. It does not say which predictions are compared: we take the p50 of when memory is
freed, and the p90 of the younger's duration, so that few are squashed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from manylora.core.memory import num_blocks
from manylora.core.scheduling.policy import Nearness, PolicyContext
from manylora.core.scheduling.sequence import Sequence
from manylora.core.types import AdapterKey

__all__ = ["Opportunity", "Running", "steps_to_end"]


@dataclass(frozen=True, slots=True)
class Running:
    """A running request, and the steps until it is expected to end."""

    sequence: Sequence
    steps_left: int


def steps_to_end(sequence: Sequence, total_output: int, max_num_batched_tokens: int) -> int:
    """Return the steps of a request if admitted now: the steps of its prompt, then one per remaining token.

    The step that ends the prompt makes the first token.
    """
    prompt_steps = ceil(max(1, sequence.num_to_run) / max_num_batched_tokens)
    return prompt_steps - 1 + max(1, total_output - sequence.num_output_tokens)


class Opportunity:
    """Answers when a waiting request will have memory for its adapter, and which running requests to squash for it."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._users: dict[AdapterKey, int] = {}  # running requests per adapter: the last one frees its pages

    def is_used(self, key: AdapterKey | None) -> bool:
        """Whether a running request uses the adapter."""
        return key in self._users

    def admitted(self, sequence: Sequence) -> None:
        """Count a request that starts to run."""
        if sequence.adapter is not None:
            self._users[sequence.adapter] = self._users.get(sequence.adapter, 0) + 1

    def stopped(self, sequence: Sequence) -> None:
        """Count a request that ended or was sent back."""
        if sequence.adapter is not None:
            self._users[sequence.adapter] -= 1
            if not self._users[sequence.adapter]:
                del self._users[sequence.adapter]

    def steps_until_room(self, sequence: Sequence, running: Iterable[Running], *, is_first: bool) -> float:
        """Return the steps until running requests will have freed the pages that a waiting one lacks.

        Infinite if all their pages do not suffice, or if it lacks room on the host instead of pages.
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

    def to_squash(
        self, older: Sequence, num_tokens: int, passers: Iterable[tuple[Sequence, int]], *, is_first: bool
    ) -> list[Sequence]:
        """Return the fewest of the passers whose pages and tokens, with the free ones, let the older request run.

        Args:
            older: The waiting request that was passed.
            num_tokens: Tokens its queue lacks for it.
            passers: Running requests that passed it, and the tokens each holds.
            is_first: Whether the older is first in line: only then may it claim pages of adapters that the squashed
                requests will wait for.

        Returns:
            The youngest first; empty if all of them were not enough, or if it can run without.
        """
        if self._context.nearness(older) < Nearness.HOST:
            return []  # its adapter is loaded by now
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
        """Return the pages that its adapter and its tokens need beyond those that it could claim now."""
        needed = sequence.num_adapter_pages + num_blocks(sequence.num_tokens_to_hold, self._context.block_size)
        return needed - self._context.num_claimable_pages(is_first)

    def check_integrity(self, num_with_adapter: int) -> None:
        """Assert that this number of running requests is counted."""
        assert sum(self._users.values()) == num_with_adapter


def _own_pages(sequence: Sequence) -> int:
    """Return the pages of KV that are likely unshared: not those found in the prefix cache."""
    return max(0, len(sequence.table.pages) - sequence.num_shared_pages)


def _adapter_pages(sequence: Sequence, left: dict[AdapterKey, int]) -> int:
    """Remove a user from ``left``; return its adapter's pages if it was the last."""
    key = sequence.adapter
    if key is None:
        return 0
    left[key] -= 1
    return sequence.num_adapter_pages if left[key] == 0 else 0
