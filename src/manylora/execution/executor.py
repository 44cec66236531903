"""The live executor: a thread per kind of work, so that loading never stops decoding.

::

    step     one thread    plan -> model -> tokens; a step planned ahead begins as soon as the step before it ends
    copy     one thread    host image -> device pages, then the views of its tiles; steps read the image meanwhile
    read     two threads   files -> packed host image, by reader processes

Each thread runs its work in order of submission, then wakes the clock. The loop gets the result through ``Work.poll``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from manylora.clock import Clock
from manylora.engine.steps.plan_ahead import fill_in
from manylora.execution.runner import LogitsHook, ModelRunner
from manylora.execution.storage.host_tier import HostAdapter, HostTier
from manylora.execution.storage.link import Link
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.reader import HostReader
from manylora.execution.storage.resident import ResidentAdapter, make_resident
from manylora.plan import ON_DEVICE, AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.types import AdapterKey, AdapterVersion, SampledToken, Tier

__all__ = ["FutureWork", "TorchExecutor"]

logger = logging.getLogger(__name__)

_NO_TOKEN = SampledToken(token_id=0)

ResultT = TypeVar("ResultT", StepResult, LoadResult)


class FutureWork(Generic[ResultT]):
    """Work on another thread; done when its future is."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[ResultT]) -> None:
        self._future: Future[ResultT] = future

    @property
    def ready_at(self) -> float:
        """Return infinity: the end of real work is not known in advance."""
        return math.inf

    def poll(self, now: float) -> ResultT | None:
        """Return the result once complete, else ``None``; raise the thread's error."""
        return self._future.result() if self._future.done() else None


class TorchExecutor:
    """Carries plans out with torch; ``resident``, adapters on the device by key, is shared with ``runner``.

    ``reads_host`` says whether the kernels can read an adapter's weights from the host tier.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        pages: PageTensor,
        link: Link,
        host: HostTier,
        reader: HostReader,
        resident: dict[AdapterKey, ResidentAdapter],
        clock: Clock,
        reads_host: bool = False,
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._link = link
        self._host = host
        self._reader = reader
        self._resident = resident
        self._clock = clock
        self.reads_host = reads_host
        self._tokens: dict[int, SampledToken] = {}  # of the last step; touched on the step's thread alone
        self._copied: dict[AdapterKey, AdapterVersion] = {}  # those that steps may read from the host
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="manylora-step")
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="manylora-copy")
        self._reads = ThreadPoolExecutor(2, thread_name_prefix="manylora-read")
        device = pages.flat.device
        self._copy_stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def logits_hook(self) -> LogitsHook | None:
        """Called with every step's logits, on the step's thread; for debugging and parity tests."""
        return self._runner.logits_hook

    @logits_hook.setter
    def logits_hook(self, hook: LogitsHook | None) -> None:
        self._runner.logits_hook = hook

    def launch(self, plan: StepPlan, now: float) -> FutureWork[StepResult]:
        """Start a step; behind a step in flight, it gets the tokens it awaits from that step directly.

        The step holds the host images that it reads from here on, so they may leave the host tier meanwhile.
        """
        images: dict[AdapterKey, HostAdapter | AdapterVersion] = {}
        if self.reads_host:
            for part in plan.sequences:
                if part.placement is not ON_DEVICE and (key := part.adapter) is not None:
                    images[key] = self._host.get(key) or self._copied[key]
        return self._watch(self._steps.submit(self._run, plan, images))

    def load_adapter(self, load: AdapterLoad, now: float) -> FutureWork[LoadResult]:
        """Start a load: files to host, or host to device pages."""
        if load.tier is Tier.HOST:
            return self._watch(self._reads.submit(_carry_out, lambda load: self._reader.read_again(load.version), load))
        assert load.tier is Tier.DEVICE, f"an adapter cannot be loaded to {load.tier}"
        if self.reads_host:
            self._copied[load.version.key] = load.version
        return self._watch(self._copies.submit(_carry_out, self._copy, load))

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget an adapter's host image or device views."""
        if tier is Tier.HOST:
            dropped = self._host.drop(key)
            self._copied.pop(key, None)
            if dropped is not None and dropped.is_read_in_place:
                self._steps.submit(self._runner.forget_batch)
        elif tier is Tier.DEVICE:
            self._resident.pop(key, None)

    def close(self) -> None:
        """Finish the step in flight, cancel waiting work and end the threads."""
        self._link.close()
        for threads in (self._reads, self._copies, self._steps):
            threads.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _watch(self, future: Future[ResultT]) -> FutureWork[ResultT]:
        future.add_done_callback(lambda _: self._clock.wake())
        return FutureWork(future)

    def _run(self, plan: StepPlan, images: Mapping[AdapterKey, HostAdapter | AdapterVersion]) -> StepResult:
        """Run a step; its tokens are on the host at the end, so the device is done when the clock is read.

        An image that was lost (see ``_copy``) is given by its version, to be read again.
        """
        began_at = time.perf_counter()
        in_host = {
            key: (image if isinstance(image, HostAdapter) else self._reader.read_again(image)).in_place()
            for key, image in images.items()
        }
        result = self._runner.run(fill_in(plan, self._tokens), in_host)
        # A step that was planned ahead awaits the tokens of failed sequences too; its own result for them is dropped.
        self._tokens = result.tokens | dict.fromkeys(result.failed, _NO_TOKEN)
        return replace(result, device_s=time.perf_counter() - began_at)

    def _copy(self, load: AdapterLoad) -> None:
        key = load.version.key
        adapter = self._host.get(key)
        if adapter is None:
            # An eviction at the same time as a second registration can lose the host copy; the files still have it.
            logger.warning("host_copy_gone adapter=%s", key)
            adapter = self._reader.read_again(load.version)
        if len(load.pages) != adapter.image.shape[0]:
            raise ValueError(f"Got {len(load.pages)} pages for an adapter of {adapter.image.shape[0]}")
        with torch.cuda.stream(self._copy_stream) if self._copy_stream is not None else nullcontext():
            self._link.copy(load.pages, adapter.image)
            resident = make_resident(adapter.layout, load.pages, self._pages, adapter.template)
            if self._copy_stream is not None:
                # A blocking event sleeps instead of spinning: the step's thread needs the core.
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._copy_stream)
                done.synchronize()
        self._resident[key] = resident


def _carry_out(load_to_tier: Callable[[AdapterLoad], object], load: AdapterLoad) -> LoadResult:
    """Run a load; every failure is a result, since one broken adapter must not end the engine."""
    began_at = time.perf_counter()
    try:
        load_to_tier(load)
    except Exception as error:
        logger.warning("load_failed adapter=%s tier=%s error=%s", load.version.key, load.tier.value, error)
        return LoadResult(error=str(error) or type(error).__name__)
    return LoadResult(device_s=time.perf_counter() - began_at)
