"""LoRA beside the base: which rows of a step belong to which adapter, and the kernels that use it.

The executor orders the rows of a step by adapter, so an adapter's rows are one *segment* and its weights are
read once per step however many sequences share it. A step without adapters has no ``LoraBatch`` at all: the
base alone pays one comparison per module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from manylora.execution.lora_grouped import apply_grouped
from manylora.execution.lora_reference import apply_reference
from manylora.execution.resident import GroupWeights, ResidentAdapter

__all__ = ["LORA_KERNELS", "LoraBatch", "LoraKernel", "LoraSegment", "StepContext", "add_embedding"]

LoraKernel = Callable[[torch.Tensor, torch.Tensor, Sequence[tuple[int, int, GroupWeights]]], None]
"""``kernel(x [rows, in], out [rows, out], parts)`` adds every part ``(start, stop, weights)`` into ``out``."""

LORA_KERNELS: dict[str, LoraKernel] = {"grouped": apply_grouped, "reference": apply_reference}
"""Implementations by name; all give the same sums, in another order of additions."""


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Rows ``[start, stop)`` of the step, of which ``[sampled_start, sampled_stop)`` among the sampled rows."""

    adapter: ResidentAdapter
    start: int
    stop: int
    sampled_start: int
    sampled_stop: int


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """A step's segments, and per group the parts that kernels take (looked up once, used by every layer).

    Args:
        segments: Segments with an adapter, in order of rows.
        token_ids: Tokens of the step ``[rows]``, for adapters of the embedding.
    """

    segments: tuple[LoraSegment, ...]
    token_ids: torch.Tensor

    def parts(self, group: str) -> list[tuple[int, int, GroupWeights]]:
        """Return the parts of ``group`` over all rows of the step."""
        return [
            (segment.start, segment.stop, weights)
            for segment in self.segments
            if (weights := segment.adapter.groups.get(group)) is not None
        ]

    def sampled_parts(self, group: str) -> list[tuple[int, int, GroupWeights]]:
        """Return the parts of ``group`` over the sampled rows: what the output head sees."""
        return [
            (segment.sampled_start, segment.sampled_stop, weights)
            for segment in self.segments
            if segment.sampled_stop > segment.sampled_start
            and (weights := segment.adapter.groups.get(group)) is not None
        ]


@dataclass(slots=True)
class StepContext:
    """What the adapted modules look at while a step runs: set before the model is called, cleared after.

    Args:
        kernel: The LoRA implementation.
        lora: The step's adapters, ``None`` when it has none.
    """

    kernel: LoraKernel
    lora: LoraBatch | None = field(default=None)


def add_embedding(batch: LoraBatch, out: torch.Tensor, group: str, scale: torch.Tensor | float | None) -> None:
    """Add an embedding's LoRA: A ``[rank, vocab]`` is gathered at the tokens, B^T as everywhere.

    Args:
        batch: The step's adapters.
        out: Embedded tokens ``[rows, hidden]``, added into.
        group: The embedding's group.
        scale: What the base embedding multiplies its output with (Gemma), applied to LoRA's share as PEFT does.
    """
    for start, stop, weights in batch.parts(group):
        tokens = batch.token_ids[start:stop]
        shrunk = out.new_zeros(stop - start, weights.rank)
        for piece in weights.a:
            num_rows, num_cols = piece.weight.shape
            column = tokens - piece.col
            inside = (column >= 0) & (column < num_cols)
            gathered = piece.weight[:, column.clamp(0, num_cols - 1)].t()
            shrunk[:, piece.row : piece.row + num_rows] += torch.where(inside[:, None], gathered, 0)
        if scale is not None:
            shrunk = shrunk * scale
        for module in weights.modules:
            for piece in module.b:
                num_rows, num_cols = piece.weight.shape
                first = module.row + piece.row
                out[start:stop, module.offset + piece.col : module.offset + piece.col + num_cols] += (
                    shrunk[:, first : first + num_rows] @ piece.weight
                )
