"""Read adapters from disk into the host tier, by reader processes.

The engine's process never parses, hashes or packs an adapter: that takes seconds for a large one, much of it in calls
that hold the interpreter lock. It maps the finished image and keeps it. An engine that may start no process reads them
itself (``InlineReader``).

A read from a registry may take minutes, and so may a few of them. So urgent reads come first. One
reader is always left for adapters on disk, whose reads take a fraction of a second, and a host that hangs occupies a
part of the others.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.sources import host_of
from manylora.core.errors import AdapterError
from manylora.core.types import AdapterKey, AdapterVersion
from manylora.execution.storage.adapter_files import InlineReader
from manylora.execution.storage.host_tier import HostAdapter, HostTier
from manylora.execution.storage.kept_images import KeptImages
from manylora.execution.storage.reader_messages import ReaderSettings
from manylora.execution.storage.reader_process import ReaderProcess
from manylora.execution.storage.shared_images import SharedImages

__all__ = [
    "NUM_PER_HOST",
    "NUM_READERS",
    "NUM_REMOTE",
    "FileReader",
    "HostReader",
    "ReadQueue",
    "RemotePlaces",
    "open_processes",
    "reason_of",
]

ResultT = TypeVar("ResultT")

FileReader: TypeAlias = ReaderProcess | InlineReader  # reads one adapter at a time
NUM_REMOTE = 4  # most reads from registries at once: a slow server may hold each up for minutes
NUM_PER_HOST = 2  # most reads from one host at once: a host that hangs leaves places for the other hosts
NUM_READERS = NUM_REMOTE + 1  # most reader processes; one is always left for adapters on disk


def open_processes() -> list[FileReader]:
    """Return the reader processes of an engine; the first is starting, while the model is loaded."""
    first = ReaderProcess()
    first.start()
    return [first, *(ReaderProcess() for _ in range(NUM_READERS - 1))]


class RemotePlaces:
    """Counts reads from registries, in all and by host. For one thread at a time."""

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


class HostReader:
    """Reads, checks and packs adapters into the host tier; blocks, safe from any thread.

    Each reader reads one adapter at a time, the first by preference; they are processes by default. Registries have all
    readers but one, if there are several. With ``kept``, images that leave the host tier are kept on disk, and come
    back from there.
    """

    def __init__(
        self,
        settings: ReaderSettings,
        host: HostTier,
        readers: Sequence[FileReader] = (),
        kept: KeptImages | None = None,
    ) -> None:
        self.host = host
        self._kept = kept
        self._readers = list(readers) or [ReaderProcess() for _ in range(NUM_READERS)]
        # Last in, first out: the second reader starts only when two adapters are read at once.
        self._free = list(reversed(self._readers))
        num_remote = max(1, len(self._readers) - 1)
        self._places = RemotePlaces(num_remote, min(NUM_PER_HOST, num_remote))
        self._changed = threading.Condition()
        root = settings.urgent_root
        self._images = None if root is None else SharedImages(settings, root)
        for reader in self._readers:
            reader.configure(settings)

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read an adapter and keep it in the host tier.

        ``AdapterError`` if the adapter cannot be served on this base.
        """
        with nullcontext() if self._images is None else self._images.locked(path) as folder:
            with self._free_reader(host_of(path)) as reader:
                packed = reader.read(name, path, folder)
            before = self.host.get(packed.version.key)
            adapter = self.host.put(packed)
            if self._images is not None and folder is not None and adapter is not before:
                self._images.hold(folder, adapter)
        return packed.version

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Check adapters by name and path without their weights, which stay on disk until ``read_again``.

        The caller asks for adapters of one registry at a time: all wait for the slowest.
        """
        registry = next(filter(None, (host_of(path) for _, path in adapters)), None)
        with self._free_reader(registry) as reader:
            return reader.check(adapters)

    def read_again(
        self,
        version: AdapterVersion,
        begun: Callable[[HostAdapter], None] = lambda adapter: None,
        *,
        is_urgent: bool = False,
    ) -> HostAdapter:
        """Bring a registered version into the host tier, layer by layer, and return it when it is complete.

        ``begun`` is called with the adapter before its first page is there, or with one that is complete already. A
        read that ``is_urgent`` runs at the priority of steps, which may wait for it. ``AdapterError`` if its directory
        is gone or broken, or holds other weights now.
        """
        if self._kept is not None and (packed := self._kept.find(version)) is not None:
            kept = self.host.put(packed)
            begun(kept)
            return kept
        adapter: HostAdapter | None = None

        def begin(packed: PackedAdapter) -> None:
            nonlocal adapter
            adapter = self.host.begin(packed)
            begun(adapter)

        def advance(num_pages: int) -> None:
            assert adapter is not None, "an adapter begins before its pages come"
            if not adapter.arrival.is_complete:
                adapter.advance(num_pages)

        try:
            with self._free_reader(host_of(version.source)) as reader:
                digests = reader.read_layers(version, begin, advance, is_urgent=is_urgent)
        except BaseException as error:
            if adapter is not None:
                self.host.fail(version.key, adapter, reason_of(error))
            raise
        assert adapter is not None
        adapter.first_digests = digests
        return adapter

    def drop(self, key: AdapterKey) -> HostAdapter | None:
        """Drop an adapter from the host tier and return it."""
        dropped = self.host.drop(key)
        if dropped is not None and self._kept is not None:
            self._kept.keep(key, dropped)
        return dropped

    def forget(self, key: AdapterKey) -> None:
        """Drop an image that was kept on disk: nothing refers to its version any more."""
        if self._kept is not None:
            self._kept.forget(key)

    def close(self) -> None:
        """End the readers."""
        for reader in self._readers:
            reader.close()

    @contextmanager
    def _free_reader(self, host: str | None) -> Iterator[FileReader]:
        with self._changed:
            self._changed.wait_for(lambda: self._free and self._places.has_room(host))
            reader = self._free.pop()
            self._places.take(host)
        try:
            yield reader
        finally:
            with self._changed:
                self._free.append(reader)
                self._places.give(host)
                self._changed.notify_all()


def reason_of(error: BaseException) -> str:
    """Return an error in words, without the name of the adapter."""
    return error.reason if isinstance(error, AdapterError) else str(error) or type(error).__name__


@dataclass(order=True, slots=True)
class _WaitingRead:
    """A read that waits; ordered by rank, then by number."""

    rank: int
    number: int
    host: str | None = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: Future[Any] = field(compare=False)


class ReadQueue:
    """Runs reads on a few threads; safe from any thread."""

    def __init__(self, num_threads: int, places: RemotePlaces) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="manylora-read")
        self._places = places
        self._lock = threading.Lock()
        self._waiting: list[_WaitingRead] = []
        self._num_submitted = 0

    def submit(self, work: Callable[[], ResultT], *, is_urgent: bool, host: str | None) -> Future[ResultT]:
        """Run a read, from a registry if it has a host; urgent ones run before all that wait.

        ``RuntimeError`` if the queue is closed.
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
        """Run reads until none may begin: a read that waited for a place may begin once another has ended."""
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
