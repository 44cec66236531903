"""LoRA kernels that the one in use is compared with; slower, with the same sums in another order.

::

    reference   every row alone, every tile as it lies: the one to read
    naive       two products for each module of each adapter: with forty adapters and seven modules a layer asks for
                hundreds of small products, and a GPU spends its time starting them
    padded      in Triton, every row by itself, at the batch's largest rank
"""

from __future__ import annotations

import torch

from manylora.execution.lora.parts import GroupParts

__all__ = ["apply_naive", "apply_padded", "apply_reference"]


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


def apply_padded(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Do the same with tables whose row blocks have one row; see ``lora.tables.PADDED``."""
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables.step.apply(x, out, parts.span)
