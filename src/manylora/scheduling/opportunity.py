"""Opportunistic bypass: who may pass a request that lacks memory for its adapter, and when that is taken back.

Everything is counted in steps: a running request makes one token in each, so no clock is needed.

::

    older request needs 6 pages     |0 .. wait 30 steps .................|   two running ones end by then: 4 + 3 pages
    younger, 20 tokens to go        |-- 1 prompt step + 20 --|  passes
    younger, 40 tokens to go        |-- 1 prompt step + 40 --------------|--------|  does not

Source: Chameleon, section 4.3.3. It does not say which prediction is compared: we take the middle estimate of when
memory comes free, and the high one (p90) of how long the younger takes, so that few are squashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf

from manylora.scheduling.sequence import Sequence
from manylora.types import AdapterKey

__all__ = ["Running", "pages_freed", "steps_to_end", "steps_until"]


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


def steps_until(num_pages: int, running: Iterable[Running], users: Mapping[AdapterKey, int]) -> float:
    """Return the steps until running requests have given back so many pages; infinite if all do not suffice.

    Args:
        num_pages: Pages that are missing.
        running: All running requests.
        users: Running requests per adapter: its pages come free with the last of them.
    """
    left = dict(users)
    for one in sorted(running, key=lambda one: one.steps_left):
        num_pages -= _own_pages(one.sequence)
        num_pages -= _adapter_pages(one.sequence, left)
        if num_pages <= 0:
            return one.steps_left
    return inf


def pages_freed(sequences: Iterable[Sequence], users: Mapping[AdapterKey, int], *, with_adapters: bool) -> int:
    """Return the pages that come free if these requests stop.

    Args:
        sequences: Running requests.
        users: Running requests per adapter.
        with_adapters: Count adapters that nobody else uses: they wait with their requests, so only whoever is
            first in line may take their pages.
    """
    left = dict(users)
    num_pages = 0
    for sequence in sequences:
        num_pages += _own_pages(sequence)
        adapter_pages = _adapter_pages(sequence, left)
        num_pages += adapter_pages if with_adapters else 0
    return num_pages


def _own_pages(sequence: Sequence) -> int:
    """Return the pages of KV that nobody else is likely to share: not those found in the prefix cache."""
    return max(0, len(sequence.table.pages) - sequence.num_shared_pages)


def _adapter_pages(sequence: Sequence, left: dict[AdapterKey, int]) -> int:
    """Return an adapter's pages if this is its last user; counts the user out."""
    key = sequence.adapter
    if key is None:
        return 0
    left[key] -= 1
    return sequence.num_adapter_pages if left[key] == 0 else 0
