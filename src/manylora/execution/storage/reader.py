"""Read adapters from disk into the host tier, by reader processes.

The engine's process never parses, hashes or packs an adapter: that takes seconds for a large one, much of it in calls
that hold the interpreter lock. It maps the finished image and keeps it. An engine that may start no process reads them
itself (``InlineReader``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.sources import host_of
from manylora.core.errors import AdapterError
from manylora.core.types import AdapterVersion
from manylora.execution.storage.host_tier import HostAdapter, HostTier
from manylora.execution.storage.inline_reader import InlineReader
from manylora.execution.storage.read_queue import RemotePlaces
from manylora.execution.storage.reader_messages import ReaderSettings
from manylora.execution.storage.reader_process import ReaderProcess

__all__ = ["NUM_PER_HOST", "NUM_READERS", "NUM_REMOTE", "FileReader", "HostReader", "open_processes", "reason_of"]

FileReader: TypeAlias = ReaderProcess | InlineReader
"""Reads one adapter at a time."""

NUM_REMOTE = 4
"""Most reads from registries at once: a slow server may hold each up for minutes."""

NUM_PER_HOST = 2
"""Of them from one host: a host that hangs leaves the others their places."""

NUM_READERS = NUM_REMOTE + 1
"""Most processes; one is always left for adapters on disk."""


def open_processes() -> list[FileReader]:
    """Return the reader processes of an engine; the first is starting, while the model is loaded."""
    first = ReaderProcess()
    first.start()
    return [first, *(ReaderProcess() for _ in range(NUM_READERS - 1))]


class HostReader:
    """Reads, checks and packs adapters into the host tier; blocks, safe from any thread.

    Registries have all readers but one, if there are several.

    Args:
        settings: Settings of the readers.
        store: The host tier.
        readers: Read adapters, each one at a time, the first by preference; processes by default.
    """

    def __init__(self, settings: ReaderSettings, store: HostTier, readers: Sequence[FileReader] = ()) -> None:
        self._store = store
        self._readers = list(readers) or [ReaderProcess() for _ in range(NUM_READERS)]
        # Last in, first out: the second reader starts only when two adapters are read at once.
        self._free = list(reversed(self._readers))
        num_remote = max(1, len(self._readers) - 1)
        self._places = RemotePlaces(num_remote, min(NUM_PER_HOST, num_remote))
        self._changed = threading.Condition()
        for reader in self._readers:
            reader.configure(settings)

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read an adapter and keep it in the host tier.

        Raises:
            AdapterError: It cannot be served on this base.
        """
        with self._free_reader(host_of(path)) as reader:
            packed = reader.read(name, path)
        self._store.put(packed)
        return packed.version

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Check adapters by name and path without their weights, which stay on disk until ``read_again``.

        Those of one registry come together, apart from others: all wait for the slowest.
        """
        host = next(filter(None, (host_of(path) for _, path in adapters)), None)
        with self._free_reader(host) as reader:
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
        read that ``is_urgent`` runs at the priority of steps, which may wait for it.

        Raises:
            AdapterError: Its directory is gone or broken, or holds other weights now.
        """
        adapter: HostAdapter | None = None

        def begin(packed: PackedAdapter) -> None:
            nonlocal adapter
            adapter = self._store.begin(packed)
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
                self._store.fail(version.key, adapter, reason_of(error))
            raise
        assert adapter is not None
        adapter.first_digests = digests
        return adapter

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
