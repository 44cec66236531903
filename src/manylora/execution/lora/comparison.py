"""LoRA kernels for comparisons with the one in use: slower, with the same sums in another order.

::

    reference   every row and every tile by itself: the definition
    naive       two products for each module of each adapter: forty adapters and seven modules per layer make hundreds
                of small products, and a GPU spends its time launching them
    padded      in Triton, every row by itself, at the batch's largest rank
"""

from __future__ import annotations

import torch

from manylora.execution.lora.parts import GroupParts

__all__ = ["apply_naive", "apply_padded", "apply_reference"]


def apply_reference(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA row by row and tile by tile; see ``lora.batch.LoraKernel``."""
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


def apply_naive(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA module by module; see ``lora.batch.LoraKernel``."""
    for part in parts.parts:
        rows, target = x[part.start : part.stop], out[part.start : part.stop]
        for module in part.weights.modules:
            shrunk = x.new_zeros(rows.shape[0], module.rank)
            for piece in part.weights.a:
                # The module's own rows of the stack that this piece holds.
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


def apply_padded(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA by tables whose row blocks have one row; see ``lora.tables.PADDED``."""
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables().apply(x, out, parts.span)
