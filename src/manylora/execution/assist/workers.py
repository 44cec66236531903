"""Workers: threads that compute the rows of an exchange, and the supervisor that releases the stream if one fails.

A worker serves a whole step in one call without the interpreter lock. Between steps it sleeps. It is the only reader of
its part of x and the only writer of its part of the result, and a step gives it the same rows in every exchange, so a
failure costs only those rows. A worker that failed is replaced before the next step, its memory with it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.costs.shares import MAX_WORKERS
from manylora.core.machine import count_cores
from manylora.execution.assist import protocol
from manylora.execution.assist.protocol import FAR, MODULUS, RELEASED, STEP
from manylora.execution.assist.words import (
    DONE,
    LAST,
    NUM_WORDS,
    POSTED,
    RESULT,
    RESULT_BYTES,
    TASK_FIELDS,
    Words,
    read_word,
    serve,
    swap_word,
    write_word,
)
from manylora.execution.kernels.cpu.openmp import Arguments, point_to

__all__ = [
    "EXCHANGE_LIMIT_S",
    "DeviceStream",
    "GrowingMemory",
    "Serve",
    "Supervisor",
    "Worker",
    "WorkerTask",
    "count_workers",
]

logger = logging.getLogger(__name__)

EXCHANGE_LIMIT_S = 10.0
"""The worker of an exchange that takes longer counts as stuck: no exchange that pays takes a hundredth of it."""

CHECK_S = 0.002  # time between two checks of the supervisor while a step is assisted

Serve = Callable[[Words, NDArray[np.int64], int], int]  # ``serve(words, tasks, number)``, as in ``words.serve``


def count_workers(num_engines: int = 1) -> int:
    """Return the workers of one of ``num_engines`` engines: its part of the cores, without two for other threads."""
    return max(1, min(MAX_WORKERS, count_cores() // num_engines - 2))


class DeviceStream(Protocol):
    """An in-order stream of a device (a GPU's is ``cuda.CudaStream``): copies, and waits for words in memory.

    One thread enqueues operations, which are executed in order and never block that thread.

    Words and host memory of operations come from ``host_memory``, and live until the operations have been executed.
    """

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeros ``[num_bytes]``, uint8, page-locked and mapped where the device needs that."""

    def write_value(self, words: Words, index: int, value: int) -> None:
        """Write a word. A thread that sees it sees the copies before it."""

    def wait_value(self, words: Words, index: int, value: int) -> None:
        """Let the stream go on once the word is at ``value`` or behind it (``protocol.is_reached``)."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the device and host memory; both are contiguous and of one type."""

    def join(self) -> None:
        """Let the device's further work come after the operations so far."""

    def wait(self) -> None:
        """Return once the operations so far have been executed; an error of the device is raised."""

    def close(self) -> None:
        """Execute the operations and end."""


class GrowingMemory:
    """Host memory for one exchange at a time; it grows, and tasks keep the earlier memory while they use it."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """Return the first ``num_bytes`` of the memory."""
        if self._memory.nbytes < num_bytes:
            self._memory = self._stream.host_memory(1 << (num_bytes - 1).bit_length())
        return self._memory[:num_bytes]


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTask:
    """An exchange's work for one worker: kernels that add into a result that was zeroed."""

    result: torch.Tensor  # ``[rows, out]``, float32, in the worker's memory
    kernels: Sequence[tuple[int, Arguments]]  # up to two addresses of kernels, each with its arguments
    weights: object  # the weights that these read by address, kept alive
    pointers: tuple[ctypes.Array[ctypes.c_void_p], ...]  # the arguments as the kernels get them
    line: tuple[int, ...]  # the task's line in a worker's ring

    @classmethod
    def of(cls, result: torch.Tensor, kernels: Sequence[tuple[int, Arguments]], weights: object) -> WorkerTask:
        """Return the task."""
        pointers = tuple(point_to(arguments) for _, arguments in kernels)
        line = [result.data_ptr(), result.nbytes]
        for (kernel, _), pointer in zip(kernels, pointers, strict=True):
            line += [kernel, ctypes.addressof(pointer)]
        line += [0] * (TASK_FIELDS - len(line))
        return cls(result, kernels, weights, pointers, tuple(line))


class Worker:
    """One thread, its words, its ring of tasks and the memory of its results.

    ``begin``, ``post`` and ``end`` are for the launching thread.

    Args:
        stream: The device's stream.
        num_tasks: Exchanges of a step at most.
        serve: Serves a step; another function for tests.
    """

    def __init__(self, stream: DeviceStream, num_tasks: int, serve: Serve = serve) -> None:
        self.words: Words = stream.host_memory(4 * NUM_WORDS).numpy().view(np.uint32)
        self.results = GrowingMemory(stream)
        self._stream = stream
        self._tasks = np.zeros((1 << (num_tasks - 1).bit_length(), TASK_FIELDS), np.int64)
        self._posted: list[WorkerTask] = []  # the step's; kept, since a worker that is stuck may read their memory
        self._number = 0
        self._is_open = True
        self._serve = serve
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manylora-assist", daemon=True)
        self._thread.start()

    @property
    def is_sound(self) -> bool:
        """Whether the worker can serve a step."""
        return self._thread.is_alive() and not protocol.is_held(read_word(self.words, DONE))

    @property
    def is_busy(self) -> bool:
        """Whether the stream may still wait for the worker."""
        done = read_word(self.words, DONE)
        return not protocol.is_reached(done - done % STEP, read_word(self.words, LAST))

    @property
    def has_failed(self) -> bool:
        """Whether the worker missed an exchange of the step; to be asked between ``end`` and the next ``begin``."""
        return protocol.has_failed(read_word(self.words, DONE), self._number)

    def begin(self) -> None:
        """Wake the worker for a step."""
        self._posted.clear()
        write_word(self.words, LAST, (self._number + FAR) % MODULUS)
        self._wake.set()

    def post(self, task: WorkerTask) -> int:
        """Enqueue the next exchange's flag; return its number, for ``wait``."""
        assert len(self._posted) < len(self._tasks), "a step has more exchanges than groups"
        self._tasks[self._number // STEP % len(self._tasks)] = task.line
        self._posted.append(task)
        self._number = (self._number + STEP) % MODULUS
        self._stream.write_value(self.words, POSTED, self._number)
        return self._number

    def wait(self, number: int) -> None:
        """Enqueue the wait for an exchange's result."""
        self._stream.wait_value(self.words, DONE, number)

    def wait_for_all(self) -> None:
        """Enqueue the wait for the results of all exchanges so far."""
        self.wait(self._number)

    def progress(self) -> tuple[int, int]:
        """Return how many of the step's exchanges the stream has come to, and how many are posted."""
        num_ahead = (self._number - read_word(self.words, POSTED)) % MODULUS // STEP
        return len(self._posted) - num_ahead, len(self._posted)

    def end(self) -> None:
        """Let the worker sleep once it has served the exchanges so far."""
        write_word(self.words, LAST, self._number)

    def hold(self) -> None:
        """Stop the worker from completing exchanges: its step broke off, and the device may never reach the others.

        Its memory is not reused, and another worker takes its place.
        """
        while not protocol.is_held(done := read_word(self.words, DONE)):
            swap_word(self.words, DONE, done, (done + 1) % MODULUS)
        self._wake.set()

    def forget(self) -> None:
        """Release the last step's tasks; not within a step."""
        self._posted.clear()

    def close(self) -> None:
        """End the thread, unless it is stuck; a step that was broken off is over."""
        self.end()
        self._is_open = False
        self._wake.set()
        if self.is_sound:
            self._thread.join()

    def check(self, posted: int, done: int, is_late: bool) -> None:
        """Hold the worker if it died or is late; release the stream if it waits for a held one.

        ``posted`` and ``done`` are its words, and ``is_late`` says that both are unchanged for too long. A worker that
        owes nothing is not late.
        """
        if not protocol.is_held(done):
            is_owing = protocol.is_reached(posted, (done + STEP) % MODULUS)
            is_alive = self._thread.is_alive()
            if is_alive and not (is_owing and is_late):
                return
            if not swap_word(self.words, DONE, done, (done + 1) % MODULUS):
                return  # it has just completed an exchange
            logger.error("assist_worker_lost is_alive=%s", is_alive)
            done = (done + 1) % MODULUS
        if protocol.may_release(read_word(self.words, POSTED), done, read_word(self.words, LAST)):
            owed = self._tasks[(done - 1) // STEP % len(self._tasks)]
            ctypes.memset(int(owed[RESULT]), 0, int(owed[RESULT_BYTES]))
            write_word(self.words, DONE, (done + RELEASED) % MODULUS)

    def _run(self) -> None:
        number = 0
        try:
            while number >= 0:
                self._wake.wait()
                self._wake.clear()
                if not self._is_open:
                    return
                number = self._serve(self.words, self._tasks, number)
        except BaseException:
            logger.exception("assist_worker_failed")


class Supervisor:
    """Checks workers while they are busy, on a thread of its own."""

    def __init__(self, limit_s: float = EXCHANGE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._workers: tuple[Worker, ...] = ()
        self._is_open = True
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manylora-assist-watch", daemon=True)
        self._thread.start()

    def watch(self, workers: Sequence[Worker]) -> None:
        """Check these workers from now on, and those of former steps for which the stream still waits."""
        self._workers = (*(worker for worker in self._workers if worker.is_busy and worker not in workers), *workers)
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._is_open = False
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while self._is_open:
            self._wake.wait()
            self._wake.clear()
            seen: dict[Worker, tuple[int, int, float]] = {}
            while self._is_open and any(worker.is_busy for worker in self._workers):
                now = time.monotonic()
                for worker in self._workers:
                    # A change of either word is progress: of the stream towards the worker, or of the worker.
                    posted, done = read_word(worker.words, POSTED), read_word(worker.words, DONE)
                    if worker not in seen or seen[worker][:2] != (posted, done):
                        seen[worker] = (posted, done, now)
                    worker.check(posted, done, now - seen[worker][2] > self._limit_s)
                if self._wake.wait(CHECK_S):
                    self._wake.clear()
