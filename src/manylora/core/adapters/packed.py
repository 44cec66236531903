"""Page images of an adapter: the host tier keeps them and copies them to the device, page by page.

An image is a filled layout: B is transposed and carries the scale, and elements have the layout's dtype. Nothing is
computed after packing; a load is a copy.

The dtype of packed weights may differ from the base's. On a CPU the base computes in float32, but a decode step is
bound by reading adapters: half the bytes take half the time and half the pages. Most checkpoints are 16-bit and lose
nothing. ``auto`` is therefore the narrowest dtype that holds every weight exactly, scale included, else float32. A
scale that is not a power of two (as of rank-stabilised LoRA) makes B inexact and keeps an adapter in float32; name the
dtype to accept the rounding.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout, GroupLayout, Tile
from manylora.core.adapters.shape import PageShape
from manylora.core.adapters.tensors import ModuleWeights
from manylora.core.errors import AdapterError
from manylora.core.types import AdapterVersion

__all__ = [
    "Allocate",
    "PackedAdapter",
    "choose_dtype",
    "choose_dtype_unread",
    "exact_dtypes",
    "image_of",
    "own_memory",
    "pack",
    "pack_groups",
]

Allocate = Callable[[int], mmap.mmap | NDArray[np.uint8]]  # returns zeroed memory of a given number of bytes


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """A version with its weights, ready to be copied to a device."""

    version: AdapterVersion  # identity and sizes
    layout: AdapterLayout  # place of each matrix in the image
    # ``[num_pages, elements per page]``, float32, float16, or uint16 with the bits of bfloat16. Padding is 0.
    image: NDArray[Any]


def own_memory(num_bytes: int) -> mmap.mmap:
    """Return zeros in a mapping of their own.

    ``malloc`` may keep freed memory scattered over its heap. A mapping returns to the system with its last reference,
    and images are most of a server's memory.
    """
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def pack(
    name: str, weights: Sequence[ModuleWeights], layout: AdapterLayout, page: PageShape, allocate: Allocate = own_memory
) -> NDArray[Any]:
    """Return the image (as in ``PackedAdapter``) of the weights of every module in ``layout``.

    The scale is multiplied into B in float32, before the only rounding to the layout's dtype. ``AdapterError`` if a
    number is too large for the layout's dtype; names the adapter ``name``.
    """
    image = image_of(allocate(layout.num_pages * page.num_bytes), layout, page)
    pack_groups(name, image, layout.groups.values(), weights, layout.dtype)
    return image


def pack_groups(
    name: str, image: NDArray[Any], groups: Iterable[GroupLayout], weights: Sequence[ModuleWeights], dtype: str
) -> None:
    """Write the weights of some groups into an image, as ``pack`` does."""
    by_module = {w.module.name: w for w in weights}
    for group in groups:
        members = [by_module[part.module.name] for part in group.modules]
        parts = [_encode(name, group.group, _shared_a(w), dtype) for w in members]
        _write(image, group.a, parts[0] if len(parts) == 1 else np.concatenate(parts))
        for part, w in zip(group.modules, members, strict=True):
            _write(image, part.b, _encode(name, part.module.name, _shared_b(w), dtype).T)
            for kind, tiles in part.vectors:
                # float32 in pages of any type: a factor of a 16-bit type would round the base's output.
                values = np.ascontiguousarray(w.vectors[kind].as_float32())
                _write(image, tiles, values.view(image.dtype).reshape(1, -1))


def _scaled_b(weights: ModuleWeights) -> NDArray[np.float32]:
    """Return B ``[out_features, rank]`` times its scale, a view if it is stored so."""
    if weights.scale == 1.0:
        return weights.b.as_float32()
    with np.errstate(over="ignore"):
        return weights.b.as_float32() * np.float32(weights.scale)


def _shared_a(weights: ModuleWeights) -> NDArray[np.float32]:
    """Return the columns of A that this device holds."""
    a, share = weights.a.as_float32(), weights.module.share
    return a if share is None else _take(a.T, share.columns).T


def _shared_b(weights: ModuleWeights) -> NDArray[np.float32]:
    """Return the rows of B that this device holds, times the scale."""
    b, share = _scaled_b(weights), weights.module.share
    return b if share is None else _take(b, share.rows)


def _take(rows: NDArray[np.float32], runs: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    """Return runs of rows; zeros beyond the last row."""
    taken = np.concatenate([rows[first:stop] for first, stop in runs])
    missing = sum(stop - first for first, stop in runs) - len(taken)
    return np.concatenate([taken, np.zeros((missing, rows.shape[1]), np.float32)]) if missing else taken


def image_of(memory: mmap.mmap | NDArray[np.uint8], layout: AdapterLayout, page: PageShape) -> NDArray[Any]:
    """Return ``memory``, of exactly the layout's bytes, as its pages."""
    return np.frombuffer(memory, _STORAGE[layout.dtype]).reshape(layout.num_pages, page.elements_of(layout.dtype))


# numpy has no bfloat16: its bits are kept as integers.
_STORAGE: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def _encode(name: str, what: str, values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    stored: NDArray[Any] = values
    numbers = values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            stored = numbers = values.astype(np.float16)
    elif dtype == "bfloat16":
        # Round to nearest, ties to even: add just under half of the last kept bit, plus that bit.
        bits = np.ascontiguousarray(values).view(np.uint32)
        stored = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        numbers = (stored.astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(numbers).all():
        raise AdapterError(name, f"weights of {what!r} times their scale are too large for {dtype}")
    return stored


def _write(image: NDArray[Any], tiles: Iterable[Tile], matrix: NDArray[Any]) -> None:
    for tile in tiles:
        piece = matrix[tile.row : tile.row + tile.num_rows, tile.col : tile.col + tile.num_cols]
        # A view of the page, not a flat copy of the piece, which is transposed if it is of B.
        image[tile.page, tile.offset : tile.offset + piece.size].reshape(piece.shape)[...] = piece


def choose_dtype(weights: Sequence[ModuleWeights], asked: str) -> str:
    """Return the dtype for an adapter; ``asked`` is the option, of which all values but ``auto`` are returned."""
    return asked if asked != "auto" else exact_dtypes(weights)[0]


def exact_dtypes(weights: Sequence[ModuleWeights]) -> list[str]:
    """Return the dtypes that hold every one of some weights exactly, the narrowest first; the last is float32."""
    narrow = [
        dtype
        for dtype, is_exact in _IS_EXACT.items()
        # A difference to the base is exact in no narrow type.
        if not any(w.replaces for w in weights)
        # B first: its scale makes it inexact more often than A.
        if all(is_exact(_scaled_b(w)) for w in weights) and all(is_exact(w.a.as_float32()) for w in weights)
    ]
    return [*narrow, "float32"]


def choose_dtype_unread(weights: Sequence[ModuleWeights], asked: str) -> str:
    """Return the dtype for an adapter whose weights were not read, by their stored types and scales.

    16-bit weights stay as they are stored if no scale makes B inexact: scales are powers of two, and in float16, where
    trained weights may be subnormal, at least 1. All others are kept in float32, also those that ``choose_dtype`` would
    find to be narrower.
    """
    if asked != "auto":
        return asked
    stored = {tensor.dtype for w in weights for tensor in (w.a, w.b)}
    if all(abs(math.frexp(w.scale)[0]) == 0.5 for w in weights):
        if stored <= _HELD_BY_BF16:
            return "bfloat16"
        if stored == {"F16"} and all(abs(w.scale) >= 1.0 for w in weights):
            return "float16"
    return "float32"


_HELD_BY_BF16 = {"BF16", "F8_E4M3", "F8_E5M2"}


def _is_bfloat16(values: NDArray[np.float32]) -> bool:
    return not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()


def _is_float16(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore", under="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


_IS_EXACT: Mapping[str, Callable[[NDArray[np.float32]], bool]] = {"bfloat16": _is_bfloat16, "float16": _is_float16}
