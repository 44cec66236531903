"""The device's memory for KV and adapters: one tensor of equal pages.

A page is one KV block across all layers, or the same elements seen flat and filled with adapter tiles. ``memory/``
keeps the owners of pages; this file has the bytes and their views::

    blocks  [num_pages, num_layers, 2, block_size, num_kv_heads, head_dim]     for attention
    flat    [num_pages, page_elements]                                        for adapters
    rows    [num_pages * num_layers * 2 * block_size, num_kv_heads, head_dim]  for writes of KV
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from manylora.core.adapters.shape import PageShape

__all__ = ["PageTensor", "consecutive", "image_tensor"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def image_tensor(image: np.ndarray) -> torch.Tensor:
    """Return packed adapter pages as a tensor over the same memory; ``uint16`` holds the bits of bfloat16."""
    if image.dtype == np.uint16:
        return torch.from_numpy(image.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(image)


_MIN_HUGE_BYTES = 256 * 2**20
"""Memory from which huge pages are asked for. Each takes 2 MiB as soon as a byte of it is written: too much for the
pool of an isolated function, of which few pages are ever used."""


def _zeros(num_bytes: int) -> mmap.mmap:
    """Return zeros; large memory in huge pages where the operating system has them: a fifth faster from end to end."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def consecutive(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, first page, number of pages) for each run of consecutive pages."""
    first = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield first, pages[first], index - first
            first = index


class PageTensor:
    """The memory of all pages, zeros at first: a page that was never written holds no NaN."""

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.dtype = _DTYPES[shape.dtype]
        sizes = (num_pages, shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu":
            self.blocks = torch.frombuffer(_zeros(num_pages * shape.num_bytes), dtype=self.dtype).view(sizes)
        else:
            self.blocks = torch.zeros(sizes, dtype=self.dtype, device=device)
        self.flat = self.blocks.view(num_pages, shape.num_elements)
        self.rows = self.blocks.view(-1, shape.num_kv_heads, shape.head_dim)
        self._bytes = self.flat.view(torch.uint8)

    def flat_as(self, dtype: str) -> torch.Tensor:
        """Return ``flat`` as elements of an adapter's type."""
        return self.flat.view(_DTYPES[dtype])

    def write(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Fill ``pages`` with the rows of ``image`` ``[len(pages), elements]``, of any type.

        On the CPU numpy copies, in one call: in one thread, without the interpreter lock, so that a load neither stops
        a step nor occupies its OpenMP threads.
        """
        source = image.view(torch.uint8)
        if self._bytes.device.type == "cpu":
            self._bytes.numpy()[np.asarray(pages, dtype=np.int64)] = source.numpy()
            return
        for row, page, count in consecutive(pages):
            self._bytes[page : page + count].copy_(source[row : row + count], non_blocking=True)

    def clear(self, pages: Sequence[int]) -> None:
        """Fill ``pages`` with zeros."""
        for _, page, count in consecutive(pages):
            self._bytes[page : page + count] = 0
