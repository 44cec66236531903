"""Logits of a step's prompt rows: the model's head on any rows of the last forward pass, a few at a time.

Transformers' causal models call their decoder, choose rows, call the head on them, and may scale or cap the logits.
Here the decoder is replaced, for the length of a call, by one that returns its recorded output. So the model's own code
makes the logits. The probe checks for each model that both ways give the same.

The logits of all rows of a long prompt would take gigabytes. Rows are cut into slices that bound their memory::

    rows     | seq 1 .......... | seq 2 ... | seq 4 ............................ |     of the step, in its order
    slices   |------- 110 rows of 151,936 logits -------|------ 110 -------|- ...      64 MiB each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manylora.core.plan import PlannedSequence, PromptRows

__all__ = ["PromptPiece", "RecordedPass", "cut_into_slices", "pieces_of", "rows_and_targets"]

SLICE_LOGITS = 2**24  # logits of a slice: 64 MiB in float32, a few rows of a large vocabulary more than keep a GPU busy


class RecordedPass:
    """Records the output of the decoder of ``model``, a causal language model, and computes logits of its rows."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Of the two, some models call the inner one alone; where both are called, the outer one returns last.
        self._candidates = {cast(nn.Module, model.base_model), cast(Any, model).get_decoder()}
        self._decoder: nn.Module | None = None  # the module that was recorded
        self._output: Any = None

    @property
    def has_output(self) -> bool:
        """Whether a forward pass was recorded."""
        return self._output is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward pass inside."""
        hooks = [module.register_forward_hook(self._record) for module in self._candidates]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[n, vocab]`` of the recorded rows ``rows`` ``[n]`` int64."""
        assert self._output is not None and self._decoder is not None, "no forward pass was recorded"
        attributes = vars(self._decoder)
        before = attributes.get("forward")
        attributes["forward"] = lambda *args, **kwargs: self._output
        try:
            output = self._model(input_ids=rows[None, :1], use_cache=False, logits_to_keep=rows)
        finally:
            if before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = before
        logits: torch.Tensor = output.logits
        return logits[0]

    def forget(self) -> None:
        """Let go of the recorded output."""
        self._output = None

    def _record(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._decoder, self._output = module, output


class PromptPiece(NamedTuple):
    """Positions ``[start, stop)`` of a sequence; ``row`` is the row of ``start`` in the step."""

    sequence: PlannedSequence
    row: int
    start: int
    stop: int
    num_top: int


def pieces_of(sequences: Sequence[PlannedSequence], wanted: Sequence[PromptRows]) -> list[PromptPiece]:
    """Return the pieces of a step, in the order of its rows; sequences that are not in the step have none."""
    by_sequence: Mapping[int, PromptRows] = {rows.seq_id: rows for rows in wanted}
    pieces: list[PromptPiece] = []
    first = 0
    for sequence in sequences:
        rows = by_sequence.get(sequence.seq_id)
        if rows is not None:
            row = first + rows.start - sequence.start
            pieces.append(PromptPiece(sequence, row, rows.start, rows.stop, rows.num_top))
        first += sequence.num_tokens
    return pieces


def cut_into_slices(pieces: Sequence[PromptPiece], vocab_size: int) -> Iterator[list[PromptPiece]]:
    """Yield the pieces in slices of at most ``SLICE_LOGITS`` logits; a long piece is cut."""
    most = max(1, SLICE_LOGITS // vocab_size)
    taken: list[PromptPiece] = []
    room = most
    for piece in pieces:
        while piece.start < piece.stop:
            num_rows = min(room, piece.stop - piece.start)
            taken.append(piece._replace(stop=piece.start + num_rows))
            piece = piece._replace(row=piece.row + num_rows, start=piece.start + num_rows)
            room -= num_rows
            if not room:
                yield taken
                taken, room = [], most
    if taken:
        yield taken


def rows_and_targets(pieces: Sequence[PromptPiece]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of a slice, and the token behind each; both ``[n]``."""
    rows = [np.arange(piece.row, piece.row + piece.stop - piece.start) for piece in pieces]
    targets = [piece.sequence.tokens[piece.start + 1 : piece.stop + 1] for piece in pieces]
    return np.concatenate(rows), np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in targets])
