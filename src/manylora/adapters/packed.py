"""An adapter as page images: what the host tier keeps and what is copied to the device, page by page.

The image is the layout filled in: B is transposed and carries the scale, numbers have the layout's type. Nothing
is computed after this; a load is a copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manylora.adapters.layout import AdapterLayout, Tile
from manylora.adapters.method import ModuleWeights
from manylora.adapters.shape import PageShape
from manylora.errors import AdapterError
from manylora.types import AdapterVersion

__all__ = ["Allocate", "PackedAdapter", "image_of", "own_memory", "pack", "scaled_b", "unpack"]

Allocate = Callable[[int], mmap.mmap]
"""Returns so many bytes of zeros."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """A version with its weights, ready to be copied to a device.

    Args:
        version: Identity and sizes.
        layout: Where in the image each matrix lies.
        image: ``[num_pages, elements]``, as many of the layout's type as fit in a page: float32, float16, or
            uint16 holding the bits of bfloat16. Elements that hold no weight are 0.
    """

    version: AdapterVersion
    layout: AdapterLayout
    image: NDArray[Any]


def own_memory(num_bytes: int) -> mmap.mmap:
    """Return zeros in memory mapped for one image alone.

    What malloc is given back it may keep, scattered over its heap; a mapping goes back to the system when the last
    reference does, and images are most of what a server holds.
    """
    return mmap.mmap(-1, num_bytes)


def pack(
    name: str,
    weights: Sequence[ModuleWeights],
    layout: AdapterLayout,
    page: PageShape,
    allocate: Allocate = own_memory,
) -> NDArray[Any]:
    """Fill a layout in.

    The scale goes into B in float32, before the one rounding to the layout's type.

    Args:
        name: The adapter, for messages.
        weights: The pairs of every module in the layout.
        layout: Made by ``lay_out`` for their ranks.
        page: The page.
        allocate: Gives the memory for the image.

    Returns:
        The image, as in ``PackedAdapter``.

    Raises:
        AdapterError: A number is too large for the layout's type.
    """
    by_module = {w.module.name: w for w in weights}
    dtype = layout.dtype
    image = image_of(allocate(layout.num_pages * page.num_bytes), layout, page)
    for group in layout.groups.values():
        members = [by_module[part.module.name] for part in group.modules]
        a_stack = np.concatenate([w.a.as_float32() for w in members])
        _write(image, group.a, _encode(name, group.group, a_stack, dtype))
        for part, w in zip(group.modules, members, strict=True):
            _write(image, part.b, _encode(name, part.module.name, scaled_b(w).T, dtype))
            if w.column_scale is not None:
                scale = w.column_scale.as_float32().reshape(1, -1)
                _write(image, part.column_scale, _encode(name, part.module.name, scale, dtype))
    return image


def scaled_b(weights: ModuleWeights) -> NDArray[np.float32]:
    """Return B ``[out_features, rank]`` times its scale, as it is kept."""
    with np.errstate(over="ignore"):
        return weights.b.as_float32() * np.float32(weights.scale)


def image_of(memory: mmap.mmap | NDArray[np.uint8], layout: AdapterLayout, page: PageShape) -> NDArray[Any]:
    """Return the pages of a layout in ``memory``, as many bytes as they have."""
    return np.frombuffer(memory, _STORAGE[layout.dtype]).reshape(layout.num_pages, page.elements_of(layout.dtype))


def unpack(packed: PackedAdapter, module_name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Read one module's matrices back: the readable inverse of ``pack``.

    Args:
        packed: The adapter.
        module_name: One of its modules.

    Returns:
        A ``[rank, in_features]`` and B ``[out_features, rank]`` with the scale in it, float32.

    Raises:
        KeyError: It has no weights for this module.
    """
    for group in packed.layout.groups.values():
        for part in group.modules:
            if part.module.name == module_name:
                a_stack = _read(packed.image, group.a, group.rank, group.in_features)
                b_rows = _read(packed.image, part.b, part.rank, part.module.out_features)
                return a_stack[part.row : part.row + part.rank], b_rows.T
    raise KeyError(module_name)


# numpy knows no bfloat16: its bits are kept as integers.
_STORAGE: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def _encode(name: str, what: str, values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    stored: NDArray[Any] = values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            stored = values.astype(np.float16)
    elif dtype == "bfloat16":
        # Round to nearest, ties to even: add just under half of the last kept bit, plus that bit.
        bits = np.ascontiguousarray(values).view(np.uint32)
        stored = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    if not np.isfinite(_decode(stored)).all():
        raise AdapterError(name, f"weights of {what!r} times their scale are too large for {dtype}")
    return stored


def _decode(stored: NDArray[Any]) -> NDArray[np.float32]:
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _write(image: NDArray[Any], tiles: Iterable[Tile], matrix: NDArray[Any]) -> None:
    for tile in tiles:
        piece = matrix[tile.row : tile.row + tile.num_rows, tile.col : tile.col + tile.num_cols]
        image[tile.page, tile.offset : tile.offset + piece.size] = piece.reshape(-1)


def _read(image: NDArray[Any], tiles: Iterable[Tile], rows: int, cols: int) -> NDArray[np.float32]:
    matrix = np.zeros((rows, cols), np.float32)
    for tile in tiles:
        piece = image[tile.page, tile.offset : tile.offset + tile.num_rows * tile.num_cols]
        matrix[tile.row : tile.row + tile.num_rows, tile.col : tile.col + tile.num_cols] = _decode(piece).reshape(
            tile.num_rows, tile.num_cols
        )
    return matrix
