"""The LoRA kernel that everybody writes first: two products for each module of each adapter.

Kept for comparison: with forty adapters and seven modules a layer asks for hundreds of small products, and a GPU
spends its time starting them.
"""

from __future__ import annotations

import torch

from manylora.execution.lora.parts import GroupParts

__all__ = ["apply_naive"]


def apply_naive(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add ``(x A^T) B^T`` of every part into its rows of ``out``.

    Args:
        x: Inputs ``[rows, in]``.
        out: Outputs of the base ``[rows, out]``, added into.
        parts: Which rows take which weights.
    """
    for part in parts.parts:
        rows, target = x[part.start : part.stop], out[part.start : part.stop]
        for module in part.weights.modules:
            shrunk = x.new_zeros(rows.shape[0], module.rank)
            for piece in part.weights.a:
                # The module's own rows of the stack, as far as this piece holds them.
                first = max(piece.row, module.row)
                last = min(piece.row + piece.weight.shape[0], module.row + module.rank)
                if first < last:
                    weight = piece.weight[first - piece.row : last - piece.row]
                    columns = rows[:, piece.col : piece.col + weight.shape[1]]
                    shrunk[:, first - module.row : last - module.row] += columns @ weight.t().to(x.dtype)
            for piece in module.b:
                num_rows, num_cols = piece.weight.shape
                column = module.offset + piece.col
                weight = piece.weight.to(x.dtype)
                target[:, column : column + num_cols] += shrunk[:, piece.row : piece.row + num_rows] @ weight
