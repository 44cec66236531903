"""The LoRA kernel to read: every row alone, every tile as it lies.

Slow on purpose; it is what the fast kernels are compared with.
"""

from __future__ import annotations

import torch

from manylora.execution.lora.parts import GroupParts

__all__ = ["apply_reference"]


def apply_reference(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add ``(x A^T) B^T`` of every part into its rows of ``out``.

    Args:
        x: Inputs ``[rows, in]``.
        out: Outputs of the base ``[rows, out]``, added into.
        parts: Which rows take which weights.
    """
    for part in parts.parts:
        weights = part.weights
        for row in range(part.start, part.stop):
            shrunk = x.new_zeros(weights.rank)
            for piece in weights.a:
                num_rows, num_cols = piece.weight.shape
                weight = piece.weight.to(x.dtype)
                shrunk[piece.row : piece.row + num_rows] += weight @ x[row, piece.col : piece.col + num_cols]
            for module in weights.modules:
                for piece in module.b:
                    num_rows, num_cols = piece.weight.shape
                    first = module.row + piece.row
                    column = module.offset + piece.col
                    out[row, column : column + num_cols] += shrunk[first : first + num_rows] @ piece.weight.to(x.dtype)
