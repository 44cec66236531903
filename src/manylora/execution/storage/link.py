"""The link from host memory to the pages: as fast as the machine, or slowed down to a stated bandwidth.

A paced link gives any machine the ratio of copy to step that another one has, so that cold starts can be measured
without the other one. The copy goes in slices and sleeps between them, on the thread that copies. Steps beside it lose
no more of the processor and the memory than the bytes themselves cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["Link"]

SLICE_S = 2e-3
"""Time of a slice at the stated bandwidth, about: longer than what waking up from a sleep takes."""


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

    def copy(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Fill ``pages`` with the rows of ``image`` ``[len(pages), elements]``."""
        if self._bytes_per_s is None:
            self._pages.write(pages, image)
            return
        page_s = image[0].nbytes / self._bytes_per_s
        num_together = max(1, int(SLICE_S / page_s))
        began_at = time.perf_counter()
        for first in range(0, len(pages), num_together):
            last = min(first + num_together, len(pages))
            self._pages.write(pages[first:last], image[first:last])
            self._is_closed.wait(began_at + last * page_s - time.perf_counter())

    def close(self) -> None:
        """Let a copy in flight end at the machine's bandwidth."""
        self._is_closed.set()
