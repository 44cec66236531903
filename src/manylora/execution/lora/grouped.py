"""The LoRA kernel that serves: true ranks, no padding, no copies.

On a CPU in float32 a group's adapters are two compiled calls at most: parts with few rows (decoding) are reading, parts
with many (prompts) are arithmetic. Where nothing can be compiled, and in other types, every part is plain products: one
shrink over the group's A stack, one expand per module, straight from the pages into slices of the output. Either way an
adapter's weights are read once per step for all its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from manylora.execution.kernels.cpu.support import CompiledKernels, find_compiled
from manylora.execution.kernels.linear import linear
from manylora.execution.lora.parts import GroupParts
from manylora.execution.storage.resident import ResidentGroup

if TYPE_CHECKING:
    from manylora.execution.kernels.cpu.lora import LoraTables
    from manylora.execution.kernels.cpu.products import ProductTables

__all__ = ["apply_grouped"]

# Up to here a part's weights are read past its rows one by one; from here on tiles of a product are quicker.
MAX_READ_ROWS = 8


def apply_grouped(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add ``(x A^T) B^T`` of every part into its rows of ``out``.

    Args:
        x: Inputs ``[rows, in]``.
        out: Outputs of the base ``[rows, out]``, added into.
        parts: Which rows take which weights.
    """
    kernels = find_compiled() if x.dtype is torch.float32 and x.device.type == "cpu" else None
    if kernels is None:
        for part in parts.parts:
            _apply(x[part.start : part.stop], out[part.start : part.stop], part.weights)
        return
    step = _prepare(parts, kernels)
    x = x.contiguous()
    if step.many is not None:
        kernels.products(x, out, step.many)
    if step.few is not None:
        kernels.lora(x, out, step.few)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Tables of the parts with many rows and of those with few."""

    many: ProductTables | None
    few: LoraTables | None


def _prepare(parts: GroupParts, kernels: CompiledKernels) -> _Prepared:
    if "grouped" not in parts.prepared:
        many = [(p.start, p.stop, p.weights) for p in parts.parts if p.stop - p.start > MAX_READ_ROWS]
        few = [(p.start, p.stop, p.weights) for p in parts.parts if p.stop - p.start <= MAX_READ_ROWS]
        parts.prepared["grouped"] = _Prepared(
            kernels.product_tables(many) if many else None, kernels.tables(few) if few else None
        )
    return cast(_Prepared, parts.prepared["grouped"])


def _apply(x: torch.Tensor, out: torch.Tensor, weights: ResidentGroup) -> None:
    shrunk = _shrink(x, weights)
    for module in weights.modules:
        for piece in module.b:
            num_rows, num_cols = piece.weight.shape
            first = module.row + piece.row
            target = out[:, module.offset + piece.col : module.offset + piece.col + num_cols]
            target.addmm_(shrunk[:, first : first + num_rows], piece.weight.to(x.dtype))


def _shrink(x: torch.Tensor, weights: ResidentGroup) -> torch.Tensor:
    if len(weights.a) == 1:
        return linear(x, weights.a[0].weight.to(x.dtype))
    shrunk = x.new_zeros(x.shape[0], weights.rank)
    for piece in weights.a:
        num_rows, num_cols = piece.weight.shape
        product = linear(x[:, piece.col : piece.col + num_cols], piece.weight.to(x.dtype))
        shrunk[:, piece.row : piece.row + num_rows] += product
    return shrunk
