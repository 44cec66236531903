"""Plans: a step or an adapter load, and their results, as data between the engine core and an executor.

An executor needs nothing else of the core.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from manylora.core.types import AdapterKey, AdapterVersion, PromptLogprobs, SampledToken, SamplingParams, Tier

__all__ = [
    "ARRIVING",
    "IN_HOST",
    "ON_DEVICE",
    "AdapterLoad",
    "LoadResult",
    "Placement",
    "PlannedSequence",
    "PromptRows",
    "StepPlan",
    "StepResult",
]


class Placement(msgspec.Struct, frozen=True):
    """The place from which a step reads an adapter's weights; one value is shared by all sequences of an adapter."""

    tier: Tier  # ``DEVICE`` (its pages) or ``HOST`` (the page images in host memory)
    # Layers with weights in that tier, counted from the first; ``None`` for all. The executor waits for the others, or
    # reads them from the tier below.
    num_layers: int | None = None


ON_DEVICE = Placement(Tier.DEVICE)
"""All weights in device pages. The base model is always on the device."""

IN_HOST = Placement(Tier.HOST)
"""All weights in the image in host memory, while a copy of it to device pages is in flight."""

ARRIVING = Placement(Tier.DEVICE, 0)
"""Weights on their way to device pages, in the order of the layers; a step waits for each layer when it comes to it."""


class PlannedSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: tokens ``[start, start + num_tokens)`` of ``tokens`` go through the model.

    ::

        tokens   | prompt ................ | generated so far |
                 0        start   start+num_tokens <= len(tokens), or one more if a token is awaited
                 |-- KV in pages --|-- this step --|

    A struct, because hundreds are created per step: creating a frozen dataclass takes 1.5 us, more than planning it.
    Its lists hold numbers, so it is outside of gc.

    ``tokens`` and ``pages`` are the engine's own lists. As long as they are the same objects they only grow, at the
    end. A sequence that was pre-empted has a new list of pages.
    """

    seq_id: int  # the sequence; unique for the life of the engine
    # All its tokens so far. The executor must not keep the list beyond the step; it may grow while the step is in
    # flight, and only the tokens below ``start + num_tokens`` count.
    tokens: Seq[int]
    num_prompt_tokens: int  # tokens of the prompt
    start: int  # tokens with KV in pages
    num_tokens: int  # tokens to run in this step
    # Block table: page of every ``block_size`` positions, long enough for ``start + num_tokens``; in front of them the
    # pages of the states that recurrent layers keep (``BaseShape.num_state_pages``, mostly none).
    pages: Seq[int]
    # Version to apply to all tokens of the step, ``None`` for the base: also of a sequence whose adapter is activated
    # behind them (aLoRA).
    adapter: AdapterKey | None
    rank: int  # its largest rank, 0 for the base; for cost models
    sampling: SamplingParams  # sampling parameters of the next token
    is_sampled: bool  # whether the step yields a token (False for all but the last prompt chunk)
    seed: int  # seed of its draws (the request's own, or one drawn for it)
    # Whether its last token, at ``start + num_tokens - 1``, is not in ``tokens`` yet: the step in flight at the launch
    # yields it (``core/engine/steps/plan_ahead.py`` fills it in).
    awaits_token: bool = False
    placement: Placement = ON_DEVICE  # place of the adapter's weights at the launch of the step


class PromptRows(msgspec.Struct, frozen=True):
    """Positions ``[start, stop)`` of a sequence's prompt whose logits tell the probability of the token behind each.

    Not a part of ``PlannedSequence``, so that a step without them pays nothing.
    """

    seq_id: int  # a sequence of the step
    start: int  # first position, among those that the step runs
    stop: int  # end of the positions, at most the prompt's last: the token behind that one is sampled
    num_top: int  # number of most likely tokens to report at each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: its sequences in the order of the batch."""

    step_id: int  # number of the step
    sequences: tuple[PlannedSequence, ...]  # its sequences
    released: tuple[int, ...] = ()  # sequences that ended since the last plan; the executor drops their state
    prompt_rows: tuple[PromptRows, ...] = ()  # positions of prompts whose log-probabilities the step yields


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The tokens that a step yields."""

    # A token for every planned sequence with ``is_sampled``, by ``seq_id``.
    tokens: dict[int, SampledToken] = field(default_factory=dict)
    device_s: float | None = None  # measured duration in seconds, if any
    # Reason by ``seq_id`` of the sequences whose adapter's weights could not be brought up or applied in the step,
    # whose logits were not finite, or whose answer's form took too much time. They have no token, and their KV is not
    # valid; the other sequences of the step are not affected.
    failed: dict[int, str] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()  # sequences of ``failed`` whose request is at fault, not its adapter
    # Sequences that the step left out, since the weights of their adapter were late and all others waited for them.
    # They have no token, and their KV is not valid, but the load goes on: they may run once it is over.
    late: frozenset[int] = frozenset()
    # A row for each of the plan's ``prompt_rows``, by ``seq_id``; none for failed and late sequences.
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    # Share of the layers, over the assisted sequences, that the CPU computed; the device took over the others.
    cpu_share: float = 1.0
    # Time in seconds of launching the step's kernels one by one, without waits for adapters; 0 for a step that was
    # replayed, and where none is.
    launch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """The load of an adapter into the next tier."""

    version: AdapterVersion  # the adapter
    tier: Tier  # destination: ``HOST`` (read and pack the files) or ``DEVICE`` (copy the host's page images)
    pages: tuple[int, ...] = ()  # device pages to fill, in the order of the layout; empty for ``HOST``
    # Whether steps may wait for a read, so that it may not run at a lower priority than they do.
    is_urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a load."""

    error: str | None = None  # reason of a failure (file missing, changed, damaged)
    device_s: float | None = None  # measured duration without its wait for the link, in seconds, if any
    layer_digests: bytes = b""  # digests of the adapter's layers, if it was read for the first time
