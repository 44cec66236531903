"""The LoRA kernel of plain torch: per adapter one shrink over the group's A stack, one expand per module.

True ranks, no padding, no copies: products go straight from the pages into slices of the output. An
adapter's weights are read once per step for all its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manylora.execution.linear import linear
from manylora.execution.resident import GroupWeights

__all__ = ["apply_grouped"]

# From here a product of its own, added afterwards, is quicker than one that adds in place.
MIN_ROWS_TO_ADD = 32
MIN_RANK_TO_ADD = 32


def apply_grouped(x: torch.Tensor, out: torch.Tensor, parts: Sequence[tuple[int, int, GroupWeights]]) -> None:
    """Add ``(x A^T) B^T`` of every part into its rows of ``out``.

    Args:
        x: Inputs ``[rows, in]``.
        out: Outputs of the base ``[rows, out]``, added into.
        parts: ``(start, stop, weights)``: whose weights the rows ``[start, stop)`` take.
    """
    for start, stop, weights in parts:
        shrunk = _shrink(x[start:stop], weights)
        rows = out[start:stop]
        for module in weights.modules:
            for piece in module.b:
                num_rows, num_cols = piece.weight.shape
                first = module.row + piece.row
                column = module.offset + piece.col
                if x.shape[0] >= MIN_ROWS_TO_ADD and num_rows >= MIN_RANK_TO_ADD:
                    rows[:, column : column + num_cols] += linear(
                        shrunk[:, first : first + num_rows], piece.weight.t()
                    )
                else:
                    rows[:, column : column + num_cols].addmm_(shrunk[:, first : first + num_rows], piece.weight)


def _shrink(x: torch.Tensor, weights: GroupWeights) -> torch.Tensor:
    if len(weights.a) == 1:
        return linear(x, weights.a[0].weight)
    shrunk = x.new_zeros(x.shape[0], weights.rank)
    for piece in weights.a:
        num_rows, num_cols = piece.weight.shape
        shrunk[:, piece.row : piece.row + num_rows].addmm_(x[:, piece.col : piece.col + num_cols], piece.weight.t())
    return shrunk
