"""The live executor: a thread per kind of work, so that loading never stops decoding.

::

    step     one thread    plan -> model -> tokens; a step planned ahead begins as soon as the step before it ends
    arrange  one thread    plan -> order of its rows, on a GPU: mostly while the step before is running
    copy     one thread    host image -> device pages, as far as the image is filled; a step may wait for each layer
    read     some threads  files -> packed host image, by reader processes, layer by layer

Each thread runs its work in order of submission, urgent reads first. The clock is woken when a step or a load has
ended, and the loop gets the result through ``Work.poll``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from manylora.core.adapters.sources import host_of
from manylora.core.clock import Clock
from manylora.core.costs.arriving import MAX_WAIT_S, WaitBudget
from manylora.core.engine.steps.plan_ahead import fill_in
from manylora.core.plan import ON_DEVICE, AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterKey, AdapterVersion, SampledToken, Tier
from manylora.execution.runner import ModelRunner, OffDevice, RowOrder
from manylora.execution.storage.arrival import ArrivingAdapter
from manylora.execution.storage.device_load import AdapterGone, CopyContext, DeviceLoad
from manylora.execution.storage.host_tier import HostAdapter
from manylora.execution.storage.page_tensor import Link
from manylora.execution.storage.reader import (
    NUM_PER_HOST,
    NUM_READERS,
    NUM_REMOTE,
    HostReader,
    ReadQueue,
    RemotePlaces,
    reason_of,
)
from manylora.execution.storage.resident import AdapterMemory, ResidentAdapter

__all__ = ["FutureWork", "TorchExecutor"]

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT", StepResult, LoadResult)


class FutureWork(Generic[ResultT]):
    """Work on another thread; done when its future is."""

    __slots__ = ("future",)

    ready_at = math.inf  # the end of real work is not known in advance

    def __init__(self, future: Future[ResultT]) -> None:
        self.future: Future[ResultT] = future

    def poll(self, now: float) -> ResultT | None:
        """Return the result once complete, else ``None``; raise the thread's error."""
        return self.future.result() if self.future.done() else None


class TorchExecutor:
    """Carries plans out with torch.

    ``reads_host`` is whether the kernels can read an adapter's weights from the host tier. ``prepare`` makes a kernel's
    data for an adapter in its pages. After ``step_wait_s`` a step goes on without sequences whose layers have not
    arrived.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        link: Link,
        reader: HostReader,
        clock: Clock,
        reads_host: bool,
        prepare: Callable[[AdapterMemory], object],
        step_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self.runner = runner
        self._host = reader.host
        self._reader = reader
        self._resident = runner.resident
        self._clock = clock
        self.reads_host = reads_host
        self._step_wait_s = step_wait_s
        # Of the last step; touched on the step's thread alone.
        self._tokens: dict[int, SampledToken] = {}
        self._failed: dict[int, str] = {}
        self._late_pages: dict[int, Sequence[int]] = {}  # of sequences whose adapter was late
        self._copied: dict[AdapterKey, AdapterVersion] = {}  # those that steps may read from the host
        self._arriving: dict[AdapterKey, DeviceLoad] = {}  # loads that have not ended, or have failed
        self._followers: dict[AdapterKey, list[DeviceLoad]] = {}  # loads that wait for a read to begin their image
        self._lock = threading.Lock()  # of the followers
        self._queued: deque[StepPlan] = deque()  # steps that have not begun
        self._owes_wake = False  # whether a step has ended of which the loop has not been told
        self._is_closing = False
        self._steps = ThreadPoolExecutor(1, "manylora-step", runner.ops.enter_step_thread)
        self._arranging = ThreadPoolExecutor(1, "manylora-arrange")
        self._reads = ReadQueue(NUM_READERS, RemotePlaces(NUM_REMOTE, NUM_PER_HOST))
        self._copy_thread = ThreadPoolExecutor(1, "manylora-copy", runner.ops.enter_thread)
        self._copies = CopyContext(link, self._copy_thread, prepare)

    def launch(self, plan: StepPlan, now: float) -> FutureWork[StepResult]:
        """Start a step; behind a step in flight, it gets the tokens it awaits from that step directly.

        The step keeps the host images that it reads, so they may leave the host tier meanwhile. It also keeps the loads
        that it waits for, and the loads of adapters in host memory, whose pages it may use as far as they have arrived.
        """
        order = self._arranging.submit(self.runner.arrange, plan.sequences) if self.runner.replays else None
        images: dict[AdapterKey, HostAdapter | AdapterVersion] = {}
        loads: dict[AdapterKey, DeviceLoad] = {}
        for part in plan.sequences:
            if part.placement is ON_DEVICE or (key := part.adapter) is None:
                continue
            if part.placement.tier is Tier.HOST:
                images[key] = self._host.get(key) or self._copied[key]
            if (load := self._arriving.get(key)) is not None:
                loads[key] = load
        self._queued.append(plan)
        step = self._steps.submit(self._run, plan, order, images, loads)
        step.add_done_callback(self._ended)
        return FutureWork(step)

    def load_adapter(self, load: AdapterLoad, now: float) -> FutureWork[LoadResult]:
        """Start a load: files to host, or host to device pages."""
        key = load.version.key
        if load.tier is Tier.HOST:
            with self._lock:
                self._followers.setdefault(key, [])
            return self._watch(self._submit_read(load, is_urgent=load.is_urgent))
        assert load.tier is Tier.DEVICE, f"an adapter cannot be loaded to {load.tier}"
        if self.reads_host:
            self._copied[key] = load.version
        arriving = self._arriving[key] = DeviceLoad(load, self._copies, self._arrived)
        with self._lock:
            adapter = self._host.get(key)
            is_read = adapter is not None or key in self._followers
            if adapter is None:
                self._followers.setdefault(key, []).append(arriving)
        if adapter is not None:
            arriving.follow(adapter)
        elif not is_read:
            # An eviction at the same time as a second registration can lose the host copy; the files still have it.
            logger.warning("host_copy_gone adapter=%s", key)
            self._submit_read(load, is_urgent=True)
        return self._watch(self._behind_steps(arriving.result))

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget an adapter's host image, what is kept of it on disk, or its device views."""
        if tier is Tier.DISK:
            self._reader.forget(key)
        elif tier is Tier.HOST:
            dropped = self._reader.drop(key)
            self._copied.pop(key, None)
            if dropped is not None and dropped.is_read_in_place:
                self._steps.submit(self.runner.forget_batch)
        elif tier is Tier.DEVICE:
            self._resident.pop(key, None)
            self._arriving.pop(key, None)

    def close(self) -> None:
        """Finish the step in flight, cancel waiting work and end the threads; no step waits for an adapter any more."""
        self._is_closing = True
        self._copies.link.close()
        self._reads.shutdown(wait=False)
        self._reader.close()
        for load in list(self._arriving.values()):
            load.abandon("the engine is closing")
        self._reads.shutdown(wait=True)
        for threads in (self._copy_thread, self._steps, self._arranging):
            threads.shutdown(wait=True, cancel_futures=True)
        self._reader.close()  # a read that had not reached its process yet may have started one

    def _ended(self, step: Future[StepResult]) -> None:
        """Wake the loop, but not between two steps: it would take the interpreter's lock from the thread that launches.

        It is told of the step once the one behind it is on the device, or has ended.
        """
        self._owes_wake = True
        if not self._queued:
            self._tell()

    def _tell(self) -> None:
        if self._owes_wake:
            self._owes_wake = False
            self._clock.wake()

    def _watch(self, future: Future[ResultT]) -> FutureWork[ResultT]:
        future.add_done_callback(lambda _: self._clock.wake())
        return FutureWork(future)

    def _run(
        self,
        plan: StepPlan,
        arranged: Future[RowOrder] | None,
        images: Mapping[AdapterKey, HostAdapter | AdapterVersion],
        loads: Mapping[AdapterKey, DeviceLoad],
    ) -> StepResult:
        """Run a step; its tokens are on the host at the end, so the device is done when the clock is read.

        An image that was lost (see ``load_adapter``) is given by its version, to be read again.
        """
        began_at = time.perf_counter()
        self._queued.popleft()
        if loads:
            self._tell()  # the step may wait for them
        whole = plan = fill_in(plan, self._tokens, self._failed, self._late_pages)
        adapters, gone, late_keys = self._find(plan.sequences, images, loads)
        without = plan.sequences if gone or late_keys else ()
        failed = {part.seq_id: gone[part.adapter] for part in without if part.adapter in gone}
        late = frozenset([part.seq_id for part in without if part.adapter in late_keys])
        if failed or late:
            kept = [part for part in plan.sequences if part.seq_id not in failed and part.seq_id not in late]
            plan = replace(plan, sequences=tuple(kept))
        # An order that was not begun is made here: another thread would be no sooner.
        order = None if arranged is None or arranged.cancel() else arranged.result()
        if order is not None and len(order.places) > len(plan.sequences):
            order = None  # some were left out
        result = self.runner.run(plan, adapters, self._tell, order)
        if failed or late:
            result = replace(result, failed=failed | result.failed, late=late | result.late)
        self._tokens, self._failed = result.tokens, result.failed
        late_parts = [part for part in whole.sequences if part.seq_id in result.late] if result.late else []
        self._late_pages = {part.seq_id: part.pages for part in late_parts}
        return replace(result, device_s=time.perf_counter() - began_at)

    def _find(
        self,
        sequences: Sequence[PlannedSequence],
        images: Mapping[AdapterKey, HostAdapter | AdapterVersion],
        loads: Mapping[AdapterKey, DeviceLoad],
    ) -> tuple[OffDevice, dict[AdapterKey | None, str], set[AdapterKey | None]]:
        """Return the adapters of a step off the device, the reason of each that is gone, and those that are late.

        Between the plan and the step an adapter may have arrived: its sequences run, so its pages are theirs. Or all
        its sequences were left out (``fill_in``): the step neither has it nor waits for it.
        """
        used = {part.adapter for part in sequences} if images or loads else set()
        in_host: dict[AdapterKey, ResidentAdapter] = {}
        arriving: dict[AdapterKey, ArrivingAdapter] = {}
        coming: dict[AdapterKey, DeviceLoad] = {}
        gone: dict[AdapterKey | None, str] = {}
        late: set[AdapterKey | None] = set()
        for key, image in images.items():
            if key in used and key not in self._resident:
                try:
                    in_host[key] = self._in_place(image)
                except Exception as error:  # whatever a file does to a reader costs only its own sequences
                    logger.warning("image_gone adapter=%s error=%s", key, error)
                    gone[key] = reason_of(error)
        wait_budget = WaitBudget(self._step_wait_s)
        for key, load in loads.items():
            if key in in_host:
                coming[key] = load
            elif key in used and key not in self._resident and key not in gone:
                try:
                    arriving[key] = load.arriving(wait_budget)
                except AdapterGone as error:
                    gone[key] = str(error)
                except TimeoutError:
                    late.add(key)
        return OffDevice(in_host, arriving, coming, wait_budget), gone, late

    def _behind_steps(self, result: Future[LoadResult]) -> Future[LoadResult]:
        """Return a load's result; a failure is reported once no step reads the pages that had arrived."""
        settled: Future[LoadResult] = Future()

        def settle(done: Future[LoadResult]) -> None:
            if done.result().error is None:
                settled.set_result(done.result())
            else:
                with suppress(RuntimeError):  # the executor is closed
                    self._steps.submit(settled.set_result, done.result())

        result.add_done_callback(settle)
        return settled

    def _in_place(self, image: HostAdapter | AdapterVersion) -> ResidentAdapter:
        adapter = image if isinstance(image, HostAdapter) else self._reader.read_again(image, is_urgent=True)
        adapter.arrival.wait(len(adapter.image))
        if adapter.arrival.error is not None:
            raise AdapterGone(adapter.arrival.error)
        return adapter.in_place()

    def _submit_read(self, load: AdapterLoad, *, is_urgent: bool) -> Future[LoadResult]:
        host = host_of(load.version.source)
        return self._reads.submit(partial(self._read, load), is_urgent=is_urgent, host=host)

    def _read(self, load: AdapterLoad) -> LoadResult:
        """Bring an adapter to the host tier, and let the loads that wait for its image follow it.

        Every failure is a result, since one broken adapter must not end the engine.
        """
        key, began_at = load.version.key, time.perf_counter()

        def begun(adapter: HostAdapter) -> None:
            for follower in self._take_followers(key):
                follower.follow(adapter)

        try:
            adapter = self._reader.read_again(load.version, begun, is_urgent=load.is_urgent)
        except Exception as error:
            reason = reason_of(error)  # clients read it: not the folder, which the log names
            if not self._is_closing:
                logger.warning("load_failed adapter=%s tier=%s error=%s", key, load.tier.value, error)
            for follower in self._take_followers(key):
                if self._is_closing:
                    follower.abandon(reason)
                follower.fail(reason)
            return LoadResult(error=reason)
        return LoadResult(device_s=time.perf_counter() - began_at, layer_digests=adapter.first_digests)

    def _take_followers(self, key: AdapterKey) -> list[DeviceLoad]:
        with self._lock:
            return self._followers.pop(key, [])

    def _arrived(self, load: DeviceLoad, weights: ResidentAdapter) -> None:
        """Keep an adapter that has arrived; on the copying thread."""
        self._resident[load.key] = weights
        if self._arriving.get(load.key) is load:
            del self._arriving[load.key]
