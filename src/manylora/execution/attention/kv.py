"""K and V in pages: the type they have there, the place of each token, and the kernels that read them.

Pages may hold them in another type than the model computes with: 16 bits, or 8 bits with a scale for each vector.
A token's *slot* is ``page * block_size + position % block_size``. All layers of a step share the slots.

Writes see pages as equal rows, of which K of a token takes one and V too, or several where their sizes differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.adapters.shape import SCALE_BYTES
from manylora.core.plan import PlannedSequence
from manylora.execution.kernels.cpu.support import find_compiled
from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["KvPages"]


class KvPages:
    """The pages as attention sees them, with queries, keys and values of ``dtype``, by default that of the pages.

    ``compiled`` are the kernels that attend decoding rows in place; ``None`` where none reads this type on this device.
    """

    def __init__(self, pages: PageTensor, dtype: torch.dtype | None = None) -> None:
        self.pages = pages
        self._dtype = dtype or pages.dtype
        self.device = pages.flat.device
        shape = pages.shape
        self.block_size = shape.block_size
        row = math.gcd(shape.key_elements, shape.value_elements)
        self._rows = pages.flat.view(-1, shape.num_kv_heads, row)
        self._rows_of = shape.key_elements // row, shape.value_elements // row  # of K and of V of a token
        is_compiled = self._dtype is torch.float32 and self.device.type == "cpu"
        self.compiled = find_compiled() if is_compiled else None

    def places(self, sequences: Sequence[PlannedSequence]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the position and the slot of every row of a step ``[rows]``."""
        positions: list[NDArray[np.int64]] = []
        slots: list[NDArray[np.int64]] = []
        for sequence in sequences:
            stop = sequence.start + sequence.num_tokens
            position = np.arange(sequence.start, stop)
            first = sequence.start // self.block_size
            table = np.asarray(sequence.pages[first : (stop - 1) // self.block_size + 1], dtype=np.int64)
            positions.append(position)
            slots.append(table[position // self.block_size - first] * self.block_size + position % self.block_size)
        return np.concatenate(positions), np.concatenate(slots)

    def rows(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of K and of V in layer 0 of each slot, one behind the other."""
        pages, places = np.divmod(slots, self.block_size)
        num_keys, num_values = self._rows_of
        first = pages * (self.pages.shape.num_layers * self.block_size * (num_keys + num_values))
        keys = (first + places * num_keys)[:, None] + np.arange(num_keys)
        values = (first + self.block_size * num_keys + places * num_values)[:, None] + np.arange(num_values)
        return keys.ravel(), values.ravel()

    def store(
        self, layer: int, rows: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V ``[kv_heads, tokens, size]`` of a layer; ``rows`` are those of layer 0."""
        pool = self._rows[layer * self.block_size * sum(self._rows_of) :]
        for own, vectors in zip(rows, (key, value), strict=True):
            pool.index_copy_(0, own, self._narrowed(vectors.transpose(0, 1)).reshape(-1, *pool.shape[1:]))

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of whole pages of a layer, each ``[pages, block_size, kv_heads, size]``."""
        parts = (self.pages.keys, self.pages.values)
        key, value = (self._widened(part[:, layer].index_select(0, pages)) for part in parts)
        return key, value

    def _narrowed(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors ``[..., head_dim]`` as the pages hold them."""
        if self.pages.dtype is not torch.int8:
            return vectors.to(self.pages.dtype)
        scales = vectors.abs().amax(-1, keepdim=True).float() / 127.0
        codes = (vectors / scales.clamp(min=1e-30)).round_().to(torch.int8)
        return torch.cat((codes, scales.view(torch.int8)), dim=-1)

    def _widened(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors of pages in the model's type."""
        if self.pages.dtype is not torch.int8:
            return vectors.to(self._dtype)
        codes, scales = vectors.split((vectors.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
        numbers: torch.Tensor = codes * scales.contiguous().view(torch.float32)
        return numbers.to(self._dtype)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that are read whole while no token has filled them: stale values may be NaN."""
        self.pages.flat.index_fill_(0, torch.tensor(pages, device=self.device), 0)
