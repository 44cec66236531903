"""The order of reads: urgent ones first, and never all threads for registries.

A read from a registry may take minutes, and so may a few of them. One thread is left for adapters on disk, whose reads
take a fraction of a second.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["ReadQueue"]

ResultT = TypeVar("ResultT")


@dataclass(order=True, slots=True)
class _Read:
    """A read that waits; ordered by rank, then by number."""

    rank: int
    number: int
    is_remote: bool = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: Future[Any] = field(compare=False)


class ReadQueue:
    """Runs reads on a few threads; safe from any thread.

    Args:
        num_threads: Reads at once.
        num_remote: Of them from registries, at most.
    """

    def __init__(self, num_threads: int, num_remote: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="manylora-read")
        self._num_remote_free = num_remote
        self._lock = threading.Lock()
        self._waiting: list[_Read] = []
        self._num_submitted = 0

    def submit(self, work: Callable[[], ResultT], *, is_urgent: bool, is_remote: bool) -> Future[ResultT]:
        """Run a read; urgent ones run before all that wait.

        Raises:
            RuntimeError: The queue is closed.
        """
        result: Future[ResultT] = Future()
        with self._lock:
            self._num_submitted += 1
            insort(self._waiting, _Read(not is_urgent, self._num_submitted, is_remote, work, result))
        self._threads.submit(self._run)
        return result

    def shutdown(self, *, wait: bool) -> None:
        """Drop the reads that wait, and end the threads once their reads have ended."""
        with self._lock:
            self._waiting.clear()
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _run(self) -> None:
        """Run reads until none may: one that had to wait for a registry's place may run after another's end."""
        while (read := self._take()) is not None:
            try:
                read.result.set_result(read.work())
            except BaseException as error:
                read.result.set_exception(error)
            with self._lock:
                self._num_remote_free += read.is_remote

    def _take(self) -> _Read | None:
        with self._lock:
            for place, read in enumerate(self._waiting):
                if not read.is_remote or self._num_remote_free:
                    self._num_remote_free -= read.is_remote
                    return self._waiting.pop(place)
        return None
