"""The matrices in a packed image, and what they mean: the oracles of packing and of kernels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.layout import Tile
from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.tensors import ModuleWeights


def unpack(packed: PackedAdapter, module_name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a module's A ``[rank, in_features]`` and scaled B ``[out_features, rank]``; ``KeyError`` without any."""
    for group in packed.layout.groups.values():
        for part in group.modules:
            if part.module.name == module_name:
                a_stack = _matrix(packed, group.a, group.rank, group.in_features)
                b_rows = _matrix(packed, part.b, part.rank, part.module.out_features)
                return a_stack[part.row : part.row + part.rank], b_rows.T
    raise KeyError(module_name)


def lora_reference(x: NDArray[np.float64], product: NDArray[np.float64], weights: ModuleWeights) -> NDArray[np.float64]:
    """Return a module's output before its bias, by the definition in ``core/adapters/method.py``.

    Args:
        x: Inputs ``[rows, in_features]``.
        product: The base's own ``x W^T`` ``[rows, out_features]``.
        weights: The module's weights.
    """
    out = product + weights.scale * (x @ weights.a.as_float32().T) @ weights.b.as_float32().T
    for kind, vector in weights.vectors.items():
        out = out * vector.as_float32() if kind.is_factor else out + vector.as_float32()
    return out


def _matrix(packed: PackedAdapter, tiles: Iterable[Tile], rows: int, cols: int) -> NDArray[np.float32]:
    matrix = np.zeros((rows, cols), np.float32)
    for tile in tiles:
        piece = packed.image[tile.page, tile.offset : tile.offset + tile.num_rows * tile.num_cols]
        if piece.dtype == np.uint16:  # the bits of bfloat16
            piece = (piece.astype(np.uint32) << 16).view(np.float32)
        place = np.s_[tile.row : tile.row + tile.num_rows, tile.col : tile.col + tile.num_cols]
        matrix[place] = piece.astype(np.float32).reshape(tile.num_rows, tile.num_cols)
    return matrix
