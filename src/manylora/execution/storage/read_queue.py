"""The order of reads: urgent ones first, and never all threads for registries, nor all of those for one host.

A read from a registry may take minutes, and so may a few of them. One thread is left for adapters on disk, whose reads
take a fraction of a second, and some for the hosts that answer.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["ReadQueue", "RemotePlaces"]

ResultT = TypeVar("ResultT")


class RemotePlaces:
    """Places for reads from registries, some of them for each host. For one thread at a time.

    Args:
        num_places: Reads at once.
        num_per_host: Of them from one host, at most.
    """

    def __init__(self, num_places: int, num_per_host: int) -> None:
        self._num_places = num_places
        self._num_per_host = num_per_host
        self._taken: Counter[str] = Counter()

    def has_room(self, host: str | None) -> bool:
        """Whether a read may begin; one from disk, without a host, always may."""
        return host is None or (self._taken.total() < self._num_places and self._taken[host] < self._num_per_host)

    def take(self, host: str | None) -> None:
        """Take a place."""
        if host is not None:
            self._taken[host] += 1

    def give(self, host: str | None) -> None:
        """Give a place back."""
        if host is not None:
            self._taken[host] -= 1
            self._taken += Counter()  # drops hosts without a read


@dataclass(order=True, slots=True)
class _WaitingRead:
    """A read that waits; ordered by rank, then by number."""

    rank: int
    number: int
    host: str | None = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: Future[Any] = field(compare=False)


class ReadQueue:
    """Runs reads on a few threads; safe from any thread.

    Args:
        num_threads: Reads at once.
        places: Of them from registries.
    """

    def __init__(self, num_threads: int, places: RemotePlaces) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="manylora-read")
        self._places = places
        self._lock = threading.Lock()
        self._waiting: list[_WaitingRead] = []
        self._num_submitted = 0

    def submit(self, work: Callable[[], ResultT], *, is_urgent: bool, host: str | None) -> Future[ResultT]:
        """Run a read, from a registry if it has a host; urgent ones run before all that wait.

        Raises:
            RuntimeError: The queue is closed.
        """
        result: Future[ResultT] = Future()
        with self._lock:
            self._num_submitted += 1
            insort(self._waiting, _WaitingRead(not is_urgent, self._num_submitted, host, work, result))
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
                self._places.give(read.host)

    def _take(self) -> _WaitingRead | None:
        with self._lock:
            for place, read in enumerate(self._waiting):
                if self._places.has_room(read.host):
                    self._places.take(read.host)
                    return self._waiting.pop(place)
        return None
