"""What the engine core asks of the machinery below it, as data and two small protocols.

The core decides, an ``Executor`` carries out: the torch executor on a device, the simulated one on a cost
model, the fake one in tests. Everything they need is in the plan: no executor looks into the core.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from manylora.adapters.shape import BaseShape
from manylora.types import AdapterKey, AdapterVersion, SampledToken, SamplingParams, Tier

__all__ = [
    "AdapterLoad",
    "AdapterReader",
    "EngineParts",
    "Executor",
    "LoadResult",
    "PlannedSequence",
    "StepPlan",
    "StepResult",
    "Work",
]


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
            was in flight at the launch yields it (``engine/follow_on.py`` fills it in).
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


class Work(Protocol):
    """Something launched: a step or a load."""

    @property
    def ready_at(self) -> float:
        """When it completes, in seconds: exact in simulation, infinite when only the device knows."""
        ...

    def poll(self, now: float) -> StepResult | LoadResult | None:
        """Return the result once complete, else ``None``. Never blocks.

        Raises:
            Exception: The step failed on the device; the engine is lost.
        """
        ...


class Executor(Protocol):
    """Carries plans out. Every call returns at once; completion is seen through ``Work.poll``.

    A live executor also wakes the loop's clock when work completes.
    """

    def launch(self, plan: StepPlan, now: float) -> Work:
        """Start a step, behind the one in flight if there is one; at most two are."""
        ...

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        """Start a load; any number in flight, carried out first in first out per link.

        A failed load is a ``LoadResult`` with ``error``, never an exception.
        """
        ...

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget what is kept for an adapter in ``tier`` (host buffers, device views); its pages are already free.

        Never called while a planned step in flight uses it.
        """
        ...


class AdapterReader(Protocol):
    """Turns a path into an adapter version, with its packed weights kept in the host tier."""

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read, check and pack an adapter. Blocks; safe from any thread, so that the loop never waits for a disk.

        Args:
            name: What the caller calls it, for messages.
            path: Its directory.

        Raises:
            AdapterError: It cannot be served on this base; says why.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine core is put together from; made by ``execution.build`` or ``sim.build``.

    Args:
        base: The base model's shape.
        num_pages: Pages in the pool.
        executor: Carries plans out.
        reader: Reads adapters.
        close: Stops threads and frees the device.
        machine: What carries plans out, in words: what a measurement was made on.
        is_accelerated: Whether steps run on a device of their own, beside this process.
    """

    base: BaseShape
    num_pages: int
    executor: Executor
    reader: AdapterReader
    close: Callable[[], None]
    machine: str = ""
    is_accelerated: bool = False
