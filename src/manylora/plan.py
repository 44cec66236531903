"""One unit of work for the machinery below the engine, as data: a step, an adapter load, and their results.

The core decides, an executor carries out. Everything that it needs is in these values: no executor looks into the core.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from manylora.types import AdapterKey, AdapterVersion, SampledToken, SamplingParams, Tier

__all__ = ["AdapterLoad", "LoadResult", "PlannedSequence", "StepPlan", "StepResult"]


class PlannedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step: tokens ``[start, start + num_tokens)`` of ``tokens`` go through the model.

    ::

        tokens   | prompt ................ | generated so far |
                 0        start   start+num_tokens <= len(tokens), or one more if a token is awaited
                 |-- KV in pages --|-- this step --|

    A struct rather than a dataclass: hundreds are made every step, and a frozen dataclass takes 1.5 us to make, more
    than deciding what goes into it.

    Args:
        seq_id: The sequence; unique for the life of the engine.
        tokens: All its tokens so far; the executor must not keep it beyond the step. While a step is in flight that
            yields another, the list may grow: what counts is what lies below ``start + num_tokens``.
        num_prompt_tokens: How many of them are the prompt.
        start: Tokens whose KV is in pages already.
        num_tokens: Tokens to run now.
        pages: Block table: page of every ``block_size`` positions, long enough for ``start + num_tokens``.
        adapter: Version to apply, ``None`` for the base alone.
        rank: Its largest rank, 0 for the base; what cost models read.
        sampling: How to choose the next token.
        is_sampled: Whether the last of these tokens yields one (False for all but the last prompt chunk).
        seed: The seed its draws are keyed by (the request's own, or one drawn for it).
        awaits_token: Whether its last token, at ``start + num_tokens - 1``, is not in ``tokens`` yet: the step that
            was in flight at the launch yields it (``engine/plan_ahead.py`` fills it in).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step's work.

    Args:
        step_id: Counts up.
        sequences: Who runs, in the order of the batch.
        released: Sequences that will not come back since the last plan: drop whatever was kept for them.
    """

    step_id: int
    sequences: tuple[PlannedSequence, ...]
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step yields.

    Args:
        tokens: A token for every planned sequence with ``is_sampled``, by ``seq_id``.
        device_s: What carrying it out took, in seconds, where that was measured.
    """

    tokens: dict[int, SampledToken] = field(default_factory=dict)
    device_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """One hop of an adapter up the tiers.

    Args:
        version: Which weights.
        tier: Where to: ``HOST`` (read and pack the files) or ``DEVICE`` (copy the host's page images).
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
        device_s: What it took once its turn on the link had come, in seconds, where that was measured.
    """

    error: str | None = None
    device_s: float | None = None
