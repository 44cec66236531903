"""Read adapters from disk into the host tier, by reader processes.

The engine's process never parses, hashes or packs an adapter: that takes seconds for a large one, much of it in calls
that hold the interpreter lock. It maps the finished image and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import LifoQueue
from typing import TypeVar

from manylora.adapters.stamp import is_provisional, provisional_key
from manylora.errors import AdapterError
from manylora.execution.storage.host_tier import HostAdapter, HostTier
from manylora.execution.storage.reader_process import ReaderProcess, ReaderSettings
from manylora.types import AdapterKey, AdapterVersion

__all__ = ["HostReader"]

T = TypeVar("T")

NUM_READERS = 2
"""Most processes: as many as the threads that register adapters, or that re-read them."""


class HostReader:
    """Reads, checks and packs adapters into the host tier; blocks, safe from any thread.

    Args:
        settings: Settings of the reader processes.
        store: The host tier.
        first: The first process, which may be starting already.
    """

    def __init__(self, settings: ReaderSettings, store: HostTier, first: ReaderProcess | None = None) -> None:
        self._store = store
        self._processes = [first or ReaderProcess(), *(ReaderProcess() for _ in range(NUM_READERS - 1))]
        self._contents: dict[
            AdapterKey, AdapterKey
        ] = {}  # content hashes of versions with a provisional key, once read
        # Last in, first out: the second process starts only when two adapters are read at once.
        self._free: LifoQueue[ReaderProcess] = LifoQueue()
        for process in reversed(self._processes):
            process.configure(settings)
            self._free.put(process)

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read an adapter and keep it in the host tier.

        Raises:
            AdapterError: It cannot be served on this base.
        """
        packed = self._by_process(lambda process: process.read(name, path)).packed
        self._store.put(packed)
        return packed.version

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Check adapters by name and path without their weights, which stay on disk until ``read_again``."""
        return self._by_process(lambda process: process.check(adapters))

    def read_again(self, version: AdapterVersion) -> HostAdapter:
        """Bring a registered version into the host tier and return it.

        Raises:
            AdapterError: Its directory is gone or broken, or holds other weights now.
        """
        found = self._by_process(lambda process: process.read(version.source, version.source, version.dtype))
        content = found.packed.version.key
        if not is_provisional(version.key):
            registered, now = version.key, content
        elif version.key in self._contents:
            registered, now = self._contents[version.key], content
        else:
            registered, now = version.key, provisional_key(found.stamp)
        if now != registered:
            raise AdapterError(
                version.source,
                f"its files changed since it was registered (version {registered[:12]} then, {now[:12]} now); "
                "register it again",
            )
        if is_provisional(version.key):
            self._contents[version.key] = content
        return self._store.put(replace(found.packed, version=version))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def _by_process(self, work: Callable[[ReaderProcess], T]) -> T:
        """Return the result of work for a process that is free, or becomes so."""
        process = self._free.get()
        try:
            return work(process)
        finally:
            self._free.put(process)
