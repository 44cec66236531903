"""The link from host memory to the pages: as fast as the machine, or slowed down to a stated bandwidth.

A copy goes in slices, in the order of the pages, and each slice is announced: a step may use the first layers while
the last are being copied. A paced link gives any machine the ratio of copy to step that another one has, so that cold
starts can be measured without the other one. It sleeps between slices, on the thread that copies. Steps beside it lose
no more of the processor and the memory than the bytes themselves cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["Link"]

SLICE_BYTES = 4 * 1024 * 1024
"""Bytes of a slice: a small part of a large adapter, and hundreds of times what announcing it costs."""

SLICE_S = 2e-3
"""Least time of a slice at a stated bandwidth, about: longer than what waking up from a sleep takes."""

MOST_SLICES = 8
"""Slices of one copy at a stated bandwidth, about: each takes 0.1 ms of processor time, and the interpreter lock, which
steps need. In slices of 2 ms, a copy of four steps took twice the processor time."""


class Link:
    """Fills pages from host images; for one thread.

    Args:
        pages: The pages.
        bytes_per_s: The bandwidth to keep to; ``None`` for that of the machine.
    """

    def __init__(self, pages: PageTensor, bytes_per_s: int | None = None) -> None:
        self._pages = pages
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
            self._pages.write(pages[first:last], image[first:last])
            if page_s:
                self._is_closed.wait(began_at + last * page_s - time.perf_counter())
            announce(last)

    def close(self) -> None:
        """Let a copy in flight end at the machine's bandwidth."""
        self._is_closed.set()
