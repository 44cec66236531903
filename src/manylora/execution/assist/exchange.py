"""The exchange of a step: rows of adapters that are not on the device, computed by workers from their host images.

::

    launching thread   x of the rows -> host | flag   base product   wait | result -> device | add    next group
    stream                ======== ==           ===============      .... ========= ====
    workers                          x A^T B^T, from the image ======

The launching thread enqueues the whole step and waits for nothing. All inputs of a group leave before its base product,
so the device computes that meanwhile. Inputs and results travel in float32: a core's arithmetic for a row takes several
times as long as the link, and the kernels are the CPU's.

All exchanges of a step share one place for inputs and one for each worker's results: the stream executes in order
(``protocol``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from manylora.core.adapters.shape import BaseShape, ModuleKind
from manylora.core.costs.arriving import remaining_s
from manylora.core.costs.shares import split_rows
from manylora.execution.assist.shares import adapter_cost, measure_classes
from manylora.execution.assist.words import serve
from manylora.execution.assist.workers import (
    EXCHANGE_LIMIT_S,
    DeviceStream,
    GrowingMemory,
    Serve,
    Supervisor,
    Worker,
    WorkerTask,
    count_workers,
)
from manylora.execution.kernels.cpu.lora import gather_kernel, lora_arguments, lora_kernel, make_tables
from manylora.execution.kernels.cpu.products import make_group_tables, product_kernel
from manylora.execution.lora.batch import LoraSegment
from manylora.execution.lora.parts import Part
from manylora.execution.storage.resident import AdapterMemory

__all__ = ["Assistant", "AssistedStep", "LostRows"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LostRows:
    """Rows ``[start, stop)`` of a step, or among its sampled rows, whose worker failed."""

    start: int
    stop: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class _BaseGroup:
    """A group of the base: its inputs and outputs; the input of an embedding is token ids."""

    num_in: int
    num_out: int
    kind: ModuleKind

    @property
    def is_embedding(self) -> bool:
        """Whether its input is token ids."""
        return self.kind is ModuleKind.EMBEDDING

    @property
    def row_bytes(self) -> int:
        return 8 if self.is_embedding else 4 * self.num_in


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """A worker's rows."""

    worker: Worker  # the worker
    first: int  # the first of its rows, among the assisted ones of the step; ``last`` is behind its last one
    last: int
    runs: tuple[tuple[int, int, LoraSegment], ...]  # the same rows in the step, as (start, stop, segment)


class _Reply:
    """A reply (``lora.parts.AssistedReply``); prepared once for a batch, numbered in each step."""

    def __init__(
        self,
        stream: DeviceStream,
        inputs: Sequence[tuple[int, int, torch.Tensor]],
        tasks: Sequence[tuple[_Share, WorkerTask]],
        parts: Sequence[Part],
    ) -> None:
        self._stream = stream
        self._inputs = inputs
        self._tasks = tasks
        self._numbers: list[int] = []
        self.parts = parts
        self.has_vectors = any(part.weights.has_vectors for part in parts)

    def send(self, x: torch.Tensor) -> None:
        """Enqueue the assisted rows of the step's inputs ``x`` ``[rows, in]``, and the workers' flags."""
        for start, stop, place in self._inputs:
            self._stream.copy(place, x[start:stop].to(place.dtype).contiguous())
        self._numbers = [share.worker.post(task) for share, task in self._tasks]

    def add_to(self, out: torch.Tensor, scale: torch.Tensor | float | None = None) -> None:
        """Enqueue the waits for the workers, the copies of their results to the device, and the sums."""
        arrived = []
        for (share, task), number in zip(self._tasks, self._numbers, strict=True):
            share.worker.wait(number)
            rows = torch.empty(task.result.shape, dtype=torch.float32, device=out.device)
            self._stream.copy(rows, task.result)
            arrived.append((share, rows))
        self._stream.join()
        for share, rows in arrived:
            if scale is not None:
                rows = rows * scale
            first = 0
            for start, stop, _ in share.runs:
                out[start:stop].add_(rows[first : first + stop - start])
                first += stop - start


class AssistedStep:
    """A step's assisted segments, and their exchanges; see ``lora.parts.Assist``.

    Kept while the segments stay the same, with the tasks that were prepared.
    """

    def __init__(
        self,
        stream: DeviceStream,
        groups: dict[str, _BaseGroup],
        inputs: GrowingMemory,
        workers: Sequence[Worker],
        segments: tuple[LoraSegment, ...],
    ) -> None:
        self.segments = segments
        self._stream = stream
        self._groups = {
            name: group for name, group in groups.items() if any(name in s.adapter.groups for s in segments)
        }
        self._replies: dict[tuple[str, bool, tuple[int, ...]], _Reply | None] = {}
        self._shares = {is_sampled: self._divide(workers, is_sampled) for is_sampled in (False, True)}
        used = {share.worker: None for shares in self._shares.values() for share in shares}
        self.workers = tuple(used)
        self._inputs = inputs
        self._began_at = 0.0

    def send(
        self, group: str, x: torch.Tensor, *, is_sampled: bool = False, without: tuple[int, ...] = ()
    ) -> _Reply | None:
        """Enqueue the inputs for a group; the device has taken over the segments whose numbers are in ``without``."""
        key = (group, is_sampled, without)
        if key not in self._replies:
            self._replies[key] = self._prepare(group, is_sampled, without)
        reply = self._replies[key]
        if reply is not None:
            reply.send(x.reshape(-1, 1 if self._groups[group].is_embedding else x.shape[-1]))
        return reply

    def begin(self) -> None:
        """Wake the workers."""
        self._began_at = time.perf_counter()
        for worker in self.workers:
            worker.begin()

    def lag_s(self) -> float:
        """Return the time by which the device is behind the launching thread: its exchanges so far tell its rate."""
        num_done, num_posted = max([worker.progress() for worker in self.workers], key=lambda counts: counts[1])
        return remaining_s(num_done, num_posted, time.perf_counter() - self._began_at) if num_done else 0.0

    def finish(self) -> list[LostRows]:
        """Let the workers sleep; return the rows of those that failed. The device has executed the step."""
        for worker in self.workers:
            worker.end()
        return [
            LostRows(start, stop, is_sampled)
            for is_sampled, shares in self._shares.items()
            for share in shares
            if share.worker.has_failed
            for start, stop, _ in share.runs
        ]

    def break_off(self) -> None:
        """Let the workers sleep after an error within the step, once the device has executed the rest of it.

        The workers and the stream read and write the memory of its exchanges until then. A device that does not come
        to the end has failed: the workers are held, for they may be asked for no other step.
        """
        try:
            for worker in self.workers:
                worker.wait_for_all()  # an exchange may have been posted, and its wait not yet enqueued
            self._stream.wait()
        except Exception:
            logger.exception("assist_step_broken_off")
            for worker in self.workers:
                worker.hold()
        for worker in self.workers:
            worker.end()

    def _divide(self, workers: Sequence[Worker], is_sampled: bool) -> list[_Share]:
        rows = [(*segment.rows(is_sampled), segment) for segment in self.segments]
        rows = [(start, stop, segment) for start, stop, segment in rows if stop > start]
        if not rows:
            return []
        costs = []
        for start, stop, segment in rows:
            layout = segment.adapter.memory.layout
            linear = [group for name, group in layout.groups.items() if self._groups[name].kind is ModuleKind.LINEAR]
            costs.append((stop - start, adapter_cost(linear, layout.dtype)))
        firsts = split_rows(costs, len(workers))
        shares = []
        for worker, first, last in zip(workers, firsts, firsts[1:], strict=False):
            runs, at = [], 0
            for start, stop, segment in rows:
                low, high = max(first - at, 0), min(last - at, stop - start)
                if low < high:
                    runs.append((start + low, start + high, segment))
                at += stop - start
            shares.append(_Share(worker, first, last, tuple(runs)))
        return shares

    def _prepare(self, name: str, is_sampled: bool, without: tuple[int, ...]) -> _Reply | None:
        group = self._groups.get(name)
        if group is None or not self._shares[is_sampled]:
            return None
        taken = [self.segments[number] for number in without]
        num_rows = self._shares[is_sampled][-1].last
        dtype = torch.int64 if group.is_embedding else torch.float32
        x = self._inputs.reserve(num_rows * group.row_bytes).view(dtype).view(num_rows, -1)
        inputs: list[tuple[int, int, torch.Tensor]] = []
        tasks: list[tuple[_Share, WorkerTask]] = []
        parts: list[Part] = []
        for share in self._shares[is_sampled]:
            own: list[Part] = []
            at = 0
            for start, stop, segment in share.runs:
                weights = segment.adapter.groups.get(name)
                if weights is not None and segment not in taken:
                    parts.append(Part(start, stop, weights))
                    if group.kind is not ModuleKind.NUMBERS:
                        inputs.append((start, stop, x[share.first + at : share.first + at + stop - start]))
                        own.append(Part(at, at + stop - start, weights))
                at += stop - start
            if own:
                result = (
                    share.worker.results.reserve(4 * at * group.num_out).view(torch.float32).view(at, group.num_out)
                )
                tasks.append((share, _task(group, x[share.first : share.last], result, own)))
        return _Reply(self._stream, inputs, tasks, parts) if parts else None


class Assistant:
    """Workers for the assisted rows of steps, one step at a time; for the thread that launches steps.

    Args:
        stream: The device's stream.
        base: The base model.
        num_workers: Threads; by default as many as the machine has cores to spare for one engine.
        serve: A worker's loop; another function for tests.
        exchange_limit_s: Time in seconds after which the worker of an exchange counts as stuck.
    """

    def __init__(
        self,
        stream: DeviceStream,
        base: BaseShape,
        *,
        num_workers: int | None = None,
        serve: Serve = serve,
        exchange_limit_s: float = EXCHANGE_LIMIT_S,
    ) -> None:
        self._stream = stream
        self._groups: dict[str, _BaseGroup] = {}
        for module in base.modules:
            before = self._groups.get(module.group)
            num_out = max(before.num_out if before else 0, module.offset + module.out_features)
            self._groups[module.group] = _BaseGroup(module.in_features, num_out, module.kind)
        for compiled in (lora_kernel, product_kernel, gather_kernel):
            compiled()  # now, not within a step
        self._inputs = GrowingMemory(stream)
        self._serve = serve
        self._workers = [self._new_worker() for _ in range(num_workers or count_workers())]
        self._supervisor = Supervisor(exchange_limit_s)
        self._step: AssistedStep | None = None
        self._measuring = ThreadPoolExecutor(1, "manylora-measure")  # not the thread that copies: loads would wait

    @property
    def num_workers(self) -> int:
        """Number of worker threads."""
        return len(self._workers)

    def prepare(self, adapter: AdapterMemory) -> None:
        """Begin to measure the cost of an adapter's rows if its shape is new; steps take a guess until it is known."""
        layout = adapter.layout
        linear = [group for name, group in layout.groups.items() if self._groups[name].kind is ModuleKind.LINEAR]
        self._measuring.submit(measure_classes, linear, layout.dtype)

    def begin(self, segments: tuple[LoraSegment, ...]) -> AssistedStep:
        """Wake workers for a step with these segments, whose adapters are host images; ``finish`` ends it."""
        if not all(worker.is_sound for worker in self._workers):
            self._workers = [worker if worker.is_sound else self._new_worker() for worker in self._workers]
            self._step = None
        if self._step is None or self._step.segments != segments:
            self._step = AssistedStep(self._stream, self._groups, self._inputs, self._workers, segments)
        self._step.begin()
        self._supervisor.watch(self._step.workers)
        return self._step

    def forget(self) -> None:
        """Release the images of the last step's adapters, except images that a stuck worker may still read."""
        self._step = None
        for worker in self._workers:
            if worker.is_sound:
                worker.forget()

    def close(self) -> None:
        """End all threads, once the device has executed all steps."""
        self._measuring.shutdown(cancel_futures=True)
        self._supervisor.close()
        for worker in self._workers:
            worker.close()
        self._stream.close()

    def _new_worker(self) -> Worker:
        # Each group once, over all rows or over the sampled ones; twice as many leave room for a model that does both.
        return Worker(self._stream, 2 * len(self._groups), self._serve)


def _task(group: _BaseGroup, x: torch.Tensor, result: torch.Tensor, parts: Sequence[Part]) -> WorkerTask:
    """Return the work for inputs ``x`` of one worker; ``parts`` count in its rows."""
    rows, names = [(part.start, part.stop, part.weights.memory) for part in parts], [parts[0].weights.layout.group]
    if group.is_embedding:
        (table,) = make_tables(rows, names).values()
        return WorkerTask.of(result, [(gather_kernel(), lora_arguments(x, result, table))], parts)
    return WorkerTask.of(result, make_group_tables(rows, names)[names[0]].calls(x, result, 1), parts)
