"""The device's memory for KV and adapters: one tensor of equal pages, and the link that fills them from the host.

A page is one KV block across all layers, or the same elements seen flat and filled with adapter tiles. ``memory/``
keeps the owners of pages; this file has the bytes and their views::

    flat    [num_pages, page_elements]                                        for adapters
    keys    [num_pages, num_layers, block_size, num_kv_heads, key_elements]   for attention: a layer's keys,
    values  [num_pages, num_layers, block_size, num_kv_heads, value_elements] and its values behind them

A vector of int8 has its scale, as float32, in its last four elements.

A copy over the link goes in slices, in the order of the pages, and each slice is announced: a step may use the first
layers while the last are being copied. A link may be slowed down to a stated bandwidth: that gives any machine the
ratio of copy to step that another one has, so that cold starts can be measured without the other one. It sleeps between
slices, on the thread that copies. Steps beside it lose no more of the processor and the memory than the bytes
themselves cost.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from manylora.core.adapters.shape import PageShape

__all__ = ["Link", "PageTensor", "consecutive", "image_tensor"]

SLICE_BYTES = 16 * 1024 * 1024
"""Bytes of a slice: a small part of a large adapter. To launch and announce one takes the interpreter lock from the
thread of steps for tens of microseconds; a GPU's link copies 4 MiB in a hundred."""

SLICE_S = 2e-3  # least time of a slice at a stated bandwidth, about: longer than what waking up from a sleep takes

MOST_SLICES = 8
"""Slices of one copy at a stated bandwidth, about: each takes 0.1 ms of processor time, and the interpreter lock, which
steps need. In slices of 2 ms, a copy of four steps took twice the processor time."""

_MIN_HUGE_BYTES = 256 * 2**20
"""Memory from which huge pages are asked for. Each takes 2 MiB as soon as a byte of it is written: too much for the
pool of an isolated function, of which few pages are ever used."""


def image_tensor(image: np.ndarray) -> torch.Tensor:
    """Return packed adapter pages as a tensor over the same memory; ``uint16`` holds the bits of bfloat16."""
    if image.dtype == np.uint16:
        return torch.from_numpy(image.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(image)


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
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        sizes = (num_pages, shape.num_elements)
        if device.type == "cpu":
            self.flat = torch.frombuffer(_zeros(num_pages * shape.num_bytes), dtype=self.dtype).view(sizes)
        else:
            self.flat = torch.zeros(sizes, dtype=self.dtype, device=device)
        vectors = shape.block_size * shape.num_kv_heads
        layers = self.flat.unflatten(1, (shape.num_layers, -1))
        self.keys, self.values = (
            part.unflatten(2, (shape.block_size, shape.num_kv_heads, -1))
            for part in layers.split((vectors * shape.key_elements, vectors * shape.value_elements), dim=2)
        )
        self._bytes = self.flat.view(torch.uint8)

    def flat_as(self, dtype: str) -> torch.Tensor:
        """Return ``flat`` as elements of an adapter's type."""
        return self.flat.view(getattr(torch, dtype))

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


class Link:
    """Fills pages from host images, at a stated bandwidth or at the machine's own; for one thread."""

    def __init__(self, pages: PageTensor, bytes_per_s: int | None = None) -> None:
        self.pages = pages
        self._bytes_per_s = bytes_per_s
        self._is_closed = threading.Event()

    def copy(self, pages: Sequence[int], image: torch.Tensor, announce: Callable[[int], None]) -> None:
        """Fill ``pages`` with the rows of ``image`` ``[len(pages), elements]``.

        ``announce`` is called after each slice with the number of pages that are filled; on a GPU, whose copy is in the
        current stream.
        """
        page_s = 0.0 if self._bytes_per_s is None else image[0].nbytes / self._bytes_per_s
        slice_s = max(SLICE_S, len(pages) * page_s / MOST_SLICES)
        num_together = max(1, round(slice_s / page_s) if page_s else SLICE_BYTES // image[0].nbytes)
        began_at = time.perf_counter()
        for first in range(0, len(pages), num_together):
            last = min(first + num_together, len(pages))
            self.pages.write(pages[first:last], image[first:last])
            if page_s:
                self._is_closed.wait(began_at + last * page_s - time.perf_counter())
            announce(last)

    def close(self) -> None:
        """Let a copy in flight end at the machine's bandwidth."""
        self._is_closed.set()
