"""The LoRA kernel that serves: true ranks, no padding, no copies.

Parts with many rows (prompts) are products: one shrink over the group's A stack, one expand per module,
straight from the pages into slices of the output. Parts with few rows (decoding) are reading, and go through
the compiled kernel in one call for all adapters where there is one. Either way an adapter's weights are read
once per step for all its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from manylora.execution.compiled import CompiledKernels, find_compiled
from manylora.execution.linear import linear
from manylora.execution.lora_parts import GroupParts, Part
from manylora.execution.resident import GroupWeights

if TYPE_CHECKING:
    from manylora.execution.compiled_lora import LoraTables

__all__ = ["apply_grouped"]

# Up to here a part's rows are read beside its weights; from here products are quicker.
MAX_COMPILED_ROWS = 8


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
    many, tables, pages = _split(parts, kernels)
    for part in many:
        _apply(x[part.start : part.stop], out[part.start : part.stop], part.weights)
    if tables is not None:
        kernels.lora(x.contiguous(), out, pages, tables)


def _split(parts: GroupParts, kernels: CompiledKernels) -> tuple[list[Part], LoraTables | None, torch.Tensor]:
    """Return the parts with many rows, the tables of the others, and the pages both lie in; prepared once."""
    if "grouped" not in parts.prepared:
        many = [part for part in parts.parts if part.stop - part.start > MAX_COMPILED_ROWS]
        few = [(p.start, p.stop, p.weights) for p in parts.parts if p.stop - p.start <= MAX_COMPILED_ROWS]
        view = parts.parts[0].weights.a[0].weight
        pages = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
        parts.prepared["grouped"] = (many, kernels.tables(few) if few else None, pages)
    return cast("tuple[list[Part], LoraTables | None, torch.Tensor]", parts.prepared["grouped"])


def _apply(x: torch.Tensor, out: torch.Tensor, weights: GroupWeights) -> None:
    shrunk = _shrink(x, weights)
    for module in weights.modules:
        for piece in module.b:
            num_rows, num_cols = piece.weight.shape
            first = module.row + piece.row
            target = out[:, module.offset + piece.col : module.offset + piece.col + num_cols]
            target.addmm_(shrunk[:, first : first + num_rows], piece.weight.to(x.dtype))


def _shrink(x: torch.Tensor, weights: GroupWeights) -> torch.Tensor:
    if len(weights.a) == 1:
        return linear(x, weights.a[0].weight.to(x.dtype))
    shrunk = x.new_zeros(x.shape[0], weights.rank)
    for piece in weights.a:
        num_rows, num_cols = piece.weight.shape
        product = linear(x[:, piece.col : piece.col + num_cols], piece.weight.to(x.dtype))
        shrunk[:, piece.row : piece.row + num_rows] += product
    return shrunk
