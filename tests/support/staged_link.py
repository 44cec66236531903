"""A link and CPU workers that take turns, so that pages arrive at chosen points of an assisted step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from faulty_serve import FaultySource

from manylora.execution.storage.page_tensor import Link, PageTensor

__all__ = ["BROKEN", "Stage", "StagedLink"]

BROKEN = "the link broke"


class Stage:
    """A link and workers that take turns: each exchange lets as many pages through as the draw gives it."""

    def __init__(self) -> None:
        self.source = FaultySource({}, during=self._during)
        self.permits = threading.Semaphore(0)
        self.breaks_at: set[int] = set()  # device pages
        self.num_let_through: list[int] = []  # by exchange
        self.handled = threading.Semaphore(0)
        self.during: Callable[[int], object] = lambda number: None

    def _during(self, number: int) -> None:
        for _ in range(self.num_let_through[number] if number < len(self.num_let_through) else 0):
            self.permits.release()
            self.handled.acquire()
        self.during(number)

    def let_all_through(self) -> None:
        self.permits.release(1000)

    def clear(self) -> None:
        """Forget the turns that no copy took, and all else that was drawn."""
        for turns in (self.permits, self.handled):
            while turns.acquire(blocking=False):
                pass
        self.num_let_through, self.breaks_at = [], set()


class StagedLink(Link):
    """The link of a stage."""

    def __init__(self, pages: PageTensor, stage: Stage) -> None:
        super().__init__(pages)
        self._stage = stage

    def copy(self, pages: Sequence[int], image: torch.Tensor, announce: Callable[[int], None]) -> None:
        stage = self._stage
        for index, page in enumerate(pages):
            stage.permits.acquire()
            try:
                if page in stage.breaks_at:
                    raise OSError(BROKEN)
                self.pages.write([page], image[index : index + 1])
                announce(index + 1)
            finally:
                stage.handled.release()
