"""Serialisation of step plans, for an executor in another process: one that runs a model on several devices.

No executor here is such a process yet. Tests hold the two sides to each other, so that a new field of a plan is sent.

::

    engine's process                                  worker's process
    StepPlan --PlanEncoder.encode--> bytes ----------> PlanDecoder.decode --> equal StepPlan
               records sent lengths                    keeps received lists

Both sides keep the same state, so a message has only differences: of a decoding sequence its id, its new token and
sometimes a page. Constants of a sequence (prompt, sampling parameters, adapter) are sent with its first plan.
``released`` removes a sequence's state on both sides.

Each worker has one stream, complete and in order. A worker that joins late needs an encoder of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec

from manylora.plan import ON_DEVICE, Placement, PlannedSequence, PromptRows, StepPlan
from manylora.types import AdapterKey, SamplingParams

__all__ = ["PlanDecoder", "PlanEncoder"]

_SAMPLED, _AWAITS, _NEW_PAGES = 1, 2, 4
"""Bits of a part's flags: it yields a token, it awaits one, its page list is new."""


class _Constants(NamedTuple):
    """Constant fields of a sequence."""

    num_prompt_tokens: int
    adapter: AdapterKey | None
    rank: int
    sampling: SamplingParams
    seed: int


class _Part(NamedTuple):
    """A ``PlannedSequence`` as it is sent."""

    seq_id: int
    start: int
    num_tokens: int
    flags: int
    tokens: Seq[int]  # since its last plan
    pages: Seq[int]  # since its last plan, or all with ``_NEW_PAGES``
    placement: Placement | None  # if it changed
    constants: _Constants | None  # with its first plan


class _Message(NamedTuple):
    step_id: int
    parts: list[_Part]
    released: tuple[int, ...]
    prompt_rows: tuple[PromptRows, ...]


class _Sent:
    """The state of one sequence on the worker's side: lengths of these two lists, and the placement."""

    __slots__ = ("num_pages", "num_tokens", "pages", "placement", "tokens")

    def __init__(self, tokens: Seq[int], pages: Seq[int]) -> None:
        self.tokens = tokens
        self.num_tokens = 0
        self.pages = pages
        self.num_pages = 0
        self.placement = ON_DEVICE


class PlanEncoder:
    """Encodes plans as differences from earlier ones."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, plan: StepPlan) -> bytes:
        """Return a plan's message. Every plan must be encoded once, at its launch, before its lists grow."""
        parts = [self._part(part) for part in plan.sequences]
        for seq_id in plan.released:
            self._sent.pop(seq_id, None)
        return self._encoder.encode(_Message(plan.step_id, parts, plan.released, plan.prompt_rows))

    def _part(self, part: PlannedSequence) -> _Part:
        tokens, pages, placement = part.tokens, part.pages, part.placement
        sent, constants = self._sent.get(part.seq_id), None
        # Lists that are the same objects have only grown; others are sent whole.
        if sent is None or sent.tokens is not tokens:
            constants = _Constants(part.num_prompt_tokens, part.adapter, part.rank, part.sampling, part.seed)
            sent = self._sent[part.seq_id] = _Sent(tokens, pages)
        flags = part.is_sampled * _SAMPLED | part.awaits_token * _AWAITS
        if sent.pages is not pages:
            sent.pages, sent.num_pages = pages, 0
            flags |= _NEW_PAGES
        new_tokens, new_pages = tokens[sent.num_tokens :], pages[sent.num_pages :]
        sent.num_tokens += len(new_tokens)
        sent.num_pages += len(new_pages)
        moved = None
        if placement is not sent.placement:
            sent.placement = moved = placement
        return _Part(part.seq_id, part.start, part.num_tokens, flags, new_tokens, new_pages, moved, constants)


class _Kept:
    """A sequence on the worker's side."""

    __slots__ = ("constants", "pages", "placement", "tokens")

    def __init__(self, constants: _Constants) -> None:
        self.constants = constants
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.placement = ON_DEVICE


class PlanDecoder:
    """Decodes the messages of one encoder into plans.

    The plans' lists are the decoder's own, with the same contract as the engine's: they may grow while a step is in
    flight, and a new page list is a new object.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._decoder = msgspec.msgpack.Decoder(_Message)

    def decode(self, message: bytes) -> StepPlan:
        """Return the plan of the next message.

        Raises:
            msgspec.DecodeError: It is no message of an encoder.
            KeyError: An earlier message is missing.
        """
        step_id, parts, released, prompt_rows = self._decoder.decode(message)
        sequences = tuple([self._planned(part) for part in parts])
        for seq_id in released:
            self._kept.pop(seq_id, None)
        return StepPlan(step_id=step_id, sequences=sequences, released=released, prompt_rows=prompt_rows)

    def _planned(self, part: _Part) -> PlannedSequence:
        seq_id, start, num_tokens, flags, tokens, pages, placement, constants = part
        if constants is not None:
            self._kept[seq_id] = _Kept(constants)
        kept = self._kept[seq_id]
        kept.tokens += tokens
        if flags & _NEW_PAGES:
            kept.pages = list(pages)
        else:
            kept.pages += pages
        if placement is not None:
            kept.placement = ON_DEVICE if placement == ON_DEVICE else placement
        num_prompt_tokens, adapter, rank, sampling, seed = kept.constants
        return PlannedSequence(
            seq_id=seq_id,
            tokens=kept.tokens,
            num_prompt_tokens=num_prompt_tokens,
            start=start,
            num_tokens=num_tokens,
            pages=kept.pages,
            adapter=adapter,
            rank=rank,
            sampling=sampling,
            is_sampled=bool(flags & _SAMPLED),
            seed=seed,
            awaits_token=bool(flags & _AWAITS),
            placement=kept.placement,
        )
