"""Progress of an adapter's pages on their way: from a file into the host image, and from the image to the device.

Pages arrive in order, so a number says all. One thread advances it; steps wait for it, and the next hop watches it. It
ends with the last page or with a failure, and either way every waiting thread goes on.

On a GPU, pages have *arrived* once their copy is in the copying stream, followed by an event. A waiting step makes its
own stream wait for that event, and its thread goes on launching.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from manylora.core.adapters.layout import GroupLayout
from manylora.core.costs.arriving import WaitBudget, remaining_s
from manylora.execution.storage.resident import ResidentAdapter

__all__ = ["Arrival", "ArrivingAdapter", "waiting"]


@contextmanager
def waiting(wait_budget: WaitBudget) -> Iterator[float | None]:
    """Return a context for a wait of a step, and its limit in seconds, ``None`` for none; its time is spent."""
    began_at = time.perf_counter()
    try:
        yield None if math.isinf(wait_budget.left_s) else wait_budget.left_s
    finally:
        wait_budget.spend(time.perf_counter() - began_at)


class Arrival:
    """How many of an adapter's pages have arrived, counted from its first; safe from any thread."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._changed = threading.Condition()
        self._counts: list[int] = []
        self._events: list[Any] = []
        self._num_over = 0  # of the events, those that are known to have happened
        self._began_at = 0.0
        self.error: str | None = None  # the reason why no more pages will arrive, if they will not
        self._watchers: list[Callable[[], None]] = []

    @property
    def num_arrived(self) -> int:
        """Pages that have arrived."""
        return self._counts[-1] if self._counts else 0

    @property
    def is_complete(self) -> bool:
        """Whether all pages have arrived."""
        return self.num_arrived == self._num_pages

    def advance(self, num_pages: int, event: Any = None) -> None:
        """Count pages up to ``num_pages`` as arrived, on a GPU once ``event`` has happened; nothing after a failure."""
        with self._changed:
            if self.error is not None:
                return
            if not self._counts:
                self._began_at = time.perf_counter()
            self._counts.append(num_pages)
            self._events.append(event)
            watchers = self._notify()
        for watcher in watchers:
            watcher()

    def fail(self, error: str) -> None:
        """End the arrival: no page will come any more. The first reason stays; once all pages are there, do nothing."""
        with self._changed:
            if self._is_over:
                return
            self.error = error
            watchers = self._notify()
        for watcher in watchers:
            watcher()

    def wait(self, num_pages: int, limit_s: float | None = None) -> Any:
        """Wait for the first ``num_pages`` or a failure; return the event that a stream has to wait for, if any.

        ``TimeoutError`` if neither came within ``limit_s`` seconds.
        """
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: self.error is not None or (self._counts and self._counts[-1] >= num_pages), limit_s
            )
            if not has_come:
                raise TimeoutError
            # After a failure the last one: a step that goes on without the pages still looks into the adapter's table.
            place = min(bisect_left(self._counts, num_pages), len(self._events) - 1)
            return self._events[place] if self._events else None

    def arrives_in_s(self, num_pages: int) -> float:
        """Return the time until the first ``num_pages`` are there: 0 if they are, infinite if unknown. Never blocks.

        On a GPU, the time of a copy that was launched is extrapolated from the pages before.
        """
        with self._changed:
            if self.error is not None or not self._counts or self._counts[-1] < num_pages:
                return math.inf
            place = bisect_left(self._counts, num_pages)
            while self._num_over <= place and ((event := self._events[self._num_over]) is None or event.query()):
                self._num_over += 1
            if place < self._num_over:
                return 0.0
            num_done = self._counts[self._num_over - 1] if self._num_over else 0
            return remaining_s(num_done, num_pages, time.perf_counter() - self._began_at)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` now and after every change to come, on the thread that makes it."""
        with self._changed:
            if not self._is_over:
                self._watchers.append(watcher)
        watcher()

    @property
    def _is_over(self) -> bool:
        return self.is_complete or self.error is not None

    def _notify(self) -> list[Callable[[], None]]:
        """Wake the waiting threads; return the watchers, which are dropped after the last change."""
        self._changed.notify_all()
        watchers = self._watchers
        self._watchers = [] if self._is_over else list(watchers)
        return watchers


@dataclass(eq=False)
class ArrivingAdapter:
    """An adapter on its way to the device, for one step."""

    weights: ResidentAdapter  # views of its pages, which fill up
    _groups: Mapping[str, GroupLayout]  # its groups, for the pages that each needs
    # The progress of the pages: once complete, all are there, on a GPU will be behind the copies in its stream. Steps
    # that used an adapter whose arrival failed have computed on zeros.
    arrival: Arrival
    wait_budget: InitVar[WaitBudget | None] = None  # the time that the step may wait; ``None`` for no limit
    # Whether the step has ceased to wait for it: its rows have computed on pages that were not there.
    is_late: bool = False

    def __post_init__(self, wait_budget: WaitBudget | None) -> None:
        self._wait_budget = wait_budget or WaitBudget(math.inf)
        self._num_awaited = -1

    def wait_for_all(self) -> None:
        """Let the current stream wait for all weights of an adapter whose arrival is complete."""
        if (event := self.arrival.wait(self.arrival.num_arrived)) is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait(self, group: str) -> None:
        """Wait for the weights of a group, on this thread or on the current stream, or for a failure.

        Once the step's time to wait is spent, the adapter is late and waited for no more.
        """
        num_pages = self._num_pages(group)
        if num_pages > self._num_awaited and not self.is_late:
            self._num_awaited = num_pages
            try:
                with waiting(self._wait_budget) as limit_s:
                    event = self.arrival.wait(num_pages, limit_s)
            except TimeoutError:
                self.is_late = True
                event = self.arrival.wait(0)  # its table's: kernels look into it, whatever its pages hold
            if event is not None:
                torch.cuda.current_stream().wait_event(event)

    def arrives_in_s(self, group: str) -> float:
        """Return the time until the weights of a group are there; see ``Arrival.arrives_in_s``."""
        return self.arrival.arrives_in_s(self._num_pages(group))

    def _num_pages(self, group: str) -> int:
        layout = self._groups.get(group)
        return layout.num_pages_needed if layout is not None else 0
