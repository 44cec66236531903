"""One adapter's load to the device: its pages are copied as its image in host memory fills, and announced to steps.

::

    files --- reader process ---> image --- link ---> pages ---> step
               layer by layer      |  Arrival          |  Arrival   waits at each layer
                                   +-> watched here    +-> waited for

Work for the link is handed to one thread in pieces: the pages that can be copied now. A load that waits for its file
holds up no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from manylora.core.adapters.layout import GroupLayout
from manylora.core.costs.arriving import WaitBudget
from manylora.core.plan import AdapterLoad, LoadResult
from manylora.execution.storage.arrival import Arrival, ArrivingAdapter, waiting
from manylora.execution.storage.host_tier import HostAdapter
from manylora.execution.storage.page_tensor import Link
from manylora.execution.storage.resident import AdapterMemory, ResidentAdapter, make_resident

__all__ = ["AdapterGone", "CopyContext", "DeviceLoad"]

logger = logging.getLogger(__name__)


class AdapterGone(Exception):
    """An adapter that a step waited for will not arrive; the message is the reason."""


class CopyContext:
    """Shared by all copies to one device, which run on one thread.

    ``prepare`` makes a kernel's data for an adapter, on that thread, before any step sees the adapter.
    """

    def __init__(self, link: Link, thread: Executor, prepare: Callable[[AdapterMemory], object]) -> None:
        self.pages = link.pages
        self.link = link
        self.thread = thread
        self.prepare = prepare
        device = self.pages.flat.device
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the device copies beside its steps."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def event(self) -> Any:
        """Return an event behind the copies so far, ``None`` where a copy is over when its call returns."""
        if self.stream is None:
            return None
        # A blocking event sleeps instead of spinning: the step's thread needs the core.
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event


class DeviceLoad:
    """A load to device pages, from its submission to its result; ``done`` is called with the adapter before that."""

    def __init__(
        self, load: AdapterLoad, copies: CopyContext, done: Callable[[DeviceLoad, ResidentAdapter], None]
    ) -> None:
        self.key = load.version.key
        self.result: Future[LoadResult] = Future()
        self._load = load
        self._copies = copies
        self._done = done
        self._arrival = Arrival(len(load.pages))
        self._views: Future[tuple[ResidentAdapter, dict[str, GroupLayout]]] = Future()
        self._num_copied = 0  # this and the time are the copying thread's
        self._busy_s = 0.0

    def follow(self, adapter: HostAdapter) -> None:
        """Copy the image's pages as they arrive in host memory."""
        adapter.arrival.watch(lambda: self._submit(lambda: self._copy(adapter)))

    def fail(self, error: str) -> None:
        """End the load with a reason, unless it has ended; steps read zeros from its pages from now on."""
        self._submit(lambda: self._fail(error))

    def abandon(self, error: str) -> None:
        """Release the steps that wait, at once and on this thread; no result will come."""
        self._arrival.fail(error)
        with suppress(InvalidStateError):
            self._views.set_exception(AdapterGone(error))

    def arriving(self, wait_budget: WaitBudget) -> ArrivingAdapter:
        """Return the adapter as a step sees it, once its layout is known. Blocks as long as the step may wait.

        ``AdapterGone`` if the adapter will not arrive; ``TimeoutError`` if its layout came too late.
        """
        with waiting(wait_budget) as limit_s:
            weights, groups = self._views.result(limit_s)
        if self._arrival.error is not None:
            raise AdapterGone(self._arrival.error)
        return ArrivingAdapter(weights, groups, self._arrival, wait_budget)

    def if_begun(self) -> ArrivingAdapter | None:
        """Return the adapter as a step sees it, ``None`` before its copy begins and after a failure. Never blocks."""
        if not self._views.done() or self._arrival.error is not None:
            return None
        return ArrivingAdapter(*self._views.result(), self._arrival)

    def _submit(self, work: Callable[[], None]) -> None:
        try:
            self._copies.thread.submit(work)
        except RuntimeError as error:  # the executor is closed
            self.abandon(str(error))

    def _copy(self, adapter: HostAdapter) -> None:
        """Copy the pages that are there and have not been copied."""
        if self.result.done():
            return
        began_at = time.perf_counter()
        first, last, error = self._num_copied, adapter.arrival.num_arrived, adapter.arrival.error
        try:
            with self._copies.on_stream():
                if not self._views.done():
                    self._begin(adapter)
                pages, image = self._load.pages[first:last], adapter.image[first:last]
                if pages:
                    self._copies.link.copy(
                        pages, image, lambda n: self._arrival.advance(first + n, self._copies.event())
                    )
                self._num_copied = last
                if self._arrival.is_complete and (event := self._copies.event()) is not None:
                    event.synchronize()
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        self._busy_s += time.perf_counter() - began_at
        if error is not None:
            self._fail(error)
        elif self._arrival.is_complete:
            self._done(self, self._views.result()[0])
            self.result.set_result(LoadResult(device_s=self._busy_s))

    def _begin(self, adapter: HostAdapter) -> None:
        if len(self._load.pages) != adapter.image.shape[0]:
            raise ValueError(f"Got {len(self._load.pages)} pages for an adapter of {adapter.image.shape[0]}")
        weights = make_resident(adapter.layout, self._load.pages, self._copies.pages, adapter.template)
        self._copies.prepare(weights.memory)
        self._arrival.advance(0, self._copies.event())  # a step's stream waits for the table, too
        self._views.set_result((weights, adapter.layout.groups))

    def _fail(self, error: str) -> None:
        if self.result.done():
            return
        if self._arrival.error is None:  # it was not abandoned
            logger.warning("load_failed adapter=%s tier=device error=%s", self.key, error)
        with self._copies.on_stream():
            # The owner before left numbers of another kind here, which may read as NaN. A step may be reading the pages
            # that have arrived.
            self._copies.pages.clear(self._load.pages[self._arrival.num_arrived :])
            if (event := self._copies.event()) is not None:
                event.synchronize()
        self.abandon(error)
        self.result.set_result(LoadResult(error=error))
