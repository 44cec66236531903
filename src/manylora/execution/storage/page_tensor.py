"""The device's memory for everything that comes and goes: one tensor of equal pages.

A page is one KV block across all layers, or the same elements seen flat and filled with adapter tiles. Who
owns which page is decided in ``memory/``; here is only the storage and its views::

    blocks  [num_pages, num_layers, 2, block_size, num_kv_heads, head_dim]     what attention sees
    flat    [num_pages, page_elements]                                        what adapters see
    rows    [num_pages * num_layers * 2 * block_size, num_kv_heads, head_dim]  what a KV write indexes
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from manylora.adapters.shape import PageShape

__all__ = ["PageTensor", "consecutive", "image_tensor"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def image_tensor(image: np.ndarray) -> torch.Tensor:
    """Return packed adapter pages as a tensor that shares their memory.

    numpy has no bfloat16, so such images hold its bits as ``uint16``.
    """
    if image.dtype == np.uint16:
        return torch.from_numpy(image.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(image)


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Return zeros in the operating system's huge pages, where it has them: a fifth quicker to read from end to end."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def consecutive(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, first page, how many) for each stretch of pages that follow one another."""
    first = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield first, pages[first], index - first
            first = index


class PageTensor:
    """The storage of all pages.

    It starts as zeros: a page that was never written holds numbers, not whatever the memory held before.

    Args:
        shape: The page.
        num_pages: How many.
        device: Where.
    """

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.dtype = _DTYPES[shape.dtype]
        sizes = (num_pages, shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu":
            self.blocks = torch.frombuffer(_huge_pages(num_pages * shape.num_bytes), dtype=self.dtype).view(sizes)
        else:
            self.blocks = torch.zeros(sizes, dtype=self.dtype, device=device)
        self.flat = self.blocks.view(num_pages, shape.num_elements)
        self.rows = self.blocks.view(-1, shape.num_kv_heads, shape.head_dim)
        self._bytes = self.flat.view(torch.uint8)

    def flat_as(self, dtype: str) -> torch.Tensor:
        """Return ``flat`` as elements of a type that an adapter is kept in."""
        return self.flat.view(_DTYPES[dtype])

    def write(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Fill ``pages`` with the rows of ``image`` ``[len(pages), elements]``, whatever type they have.

        On the CPU numpy copies: one thread, without the interpreter lock, so that a load neither stops a step
        nor takes part in its thread team.
        """
        source = image.view(torch.uint8)
        if self._bytes.device.type == "cpu":
            target, rows = self._bytes.numpy(), source.numpy()
            for row, page in enumerate(pages):
                target[page] = rows[row]
            return
        for row, page, count in consecutive(pages):
            self._bytes[page : page + count].copy_(source[row : row + count], non_blocking=True)
