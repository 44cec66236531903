"""One unit of work for the machinery below the engine, as data: a step, an adapter load, and their results.

The core decides, an executor carries out. These values hold all that it needs: no executor looks into the core. An
executor in another process gets the same values through ``plan_wire.py``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from manylora.types import AdapterKey, AdapterVersion, SampledToken, SamplingParams, Tier

__all__ = [
    "IN_HOST",
    "ON_DEVICE",
    "AdapterLoad",
    "LoadResult",
    "Placement",
    "PlannedSequence",
    "StepPlan",
    "StepResult",
]


class Placement(msgspec.Struct, frozen=True):
    """Where a step reads an adapter's weights.

    One value is shared by all sequences of an adapter, so that planning a sequence makes nothing for it.

    Args:
        tier: ``DEVICE`` (its pages) or ``HOST`` (the page images in host memory).
        num_layers: Layers whose weights are there, counted from the first; ``None`` for all. The executor waits for
            the others, or takes them from the tier below.
    """

    tier: Tier
    num_layers: int | None = None


ON_DEVICE = Placement(Tier.DEVICE)
"""All weights in device pages. The base model is always there."""

IN_HOST = Placement(Tier.HOST)
"""All weights in the image in host memory, while a copy of it to device pages is on its way."""


class PlannedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step: tokens ``[start, start + num_tokens)`` of ``tokens`` go through the model.

    ::

        tokens   | prompt ................ | generated so far |
                 0        start   start+num_tokens <= len(tokens), or one more if a token is awaited
                 |-- KV in pages --|-- this step --|

    A struct rather than a dataclass: hundreds are made every step, and a frozen dataclass takes 1.5 us to make, more
    than deciding its contents.

    ``tokens`` and ``pages`` are the engine's own lists. As long as they are the same objects they only grow, at the
    end; a sequence that was pre-empted comes back with another list of pages.

    Args:
        seq_id: The sequence; unique for the life of the engine.
        tokens: All its tokens so far; the executor must not keep it beyond the step. While a step is in flight that
            yields another, the list may grow: only the tokens below ``start + num_tokens`` count.
        num_prompt_tokens: How many of them are the prompt.
        start: Tokens whose KV is in pages already.
        num_tokens: Tokens to run now.
        pages: Block table: page of every ``block_size`` positions, long enough for ``start + num_tokens``.
        adapter: Version to apply, ``None`` for the base alone.
        rank: Its largest rank, 0 for the base; for cost models.
        sampling: How to choose the next token.
        is_sampled: Whether the last of these tokens yields one (False for all but the last prompt chunk).
        seed: The seed its draws are keyed by (the request's own, or one drawn for it).
        awaits_token: Whether its last token, at ``start + num_tokens - 1``, is not in ``tokens`` yet: the step that
            was in flight at the launch yields it (``engine/plan_ahead.py`` fills it in).
        placement: Where the adapter's weights are when the step is launched.
    """

    seq_id: int
    tokens: Seq[int]
    num_prompt_tokens: int
    start: int
    num_tokens: int
    pages: Seq[int]
    adapter: AdapterKey | None
    rank: int
    sampling: SamplingParams
    is_sampled: bool
    seed: int
    awaits_token: bool = False
    placement: Placement = ON_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step's work.

    Args:
        step_id: Counts up.
        sequences: Its sequences, in the order of the batch.
        released: Sequences that ended since the last plan: drop all that is kept for them.
    """

    step_id: int
    sequences: tuple[PlannedSequence, ...]
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The tokens that a step yields.

    Args:
        tokens: A token for every planned sequence with ``is_sampled``, by ``seq_id``.
        device_s: Seconds that it took to run, where that was measured.
    """

    tokens: dict[int, SampledToken] = field(default_factory=dict)
    device_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """One hop of an adapter up the tiers.

    Args:
        version: The weights.
        tier: The destination: ``HOST`` (read and pack the files) or ``DEVICE`` (copy the host's page images).
        pages: Device pages to fill, in the order of the layout; empty for ``HOST``.
    """

    version: AdapterVersion
    tier: Tier
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """How a load ended.

    Args:
        error: Why it failed, in words (file gone, changed, corrupt).
        device_s: Seconds from its turn on the link to its end, where that was measured.
    """

    error: str | None = None
    device_s: float | None = None
