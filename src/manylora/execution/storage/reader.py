"""Read adapters from disk into the host tier, by reader processes.

The engine's process never parses, hashes or packs an adapter: that takes seconds for a large one, much of it in calls
that hold the interpreter lock. It maps the finished image and keeps it.
"""

from __future__ import annotations

from queue import LifoQueue

from manylora.adapters.packed import PackedAdapter
from manylora.adapters.shape import BaseShape
from manylora.errors import AdapterError
from manylora.execution.storage.host_tier import HostAdapter, HostTier
from manylora.execution.storage.reader_process import ReaderProcess
from manylora.types import AdapterVersion

__all__ = ["HostReader"]

NUM_READERS = 2
"""Most processes: as many as the threads that register adapters, or that re-read them."""


class HostReader:
    """Reads, checks and packs adapters into the host tier; blocks, safe from any thread.

    ``max_bytes`` is the largest weight file accepted, ``dtype`` as in ``read_adapter``.
    """

    def __init__(self, base: BaseShape, store: HostTier, *, max_bytes: int, dtype: str | None = None) -> None:
        self._store = store
        self._processes = [ReaderProcess(base, max_bytes=max_bytes, dtype=dtype) for _ in range(NUM_READERS)]
        # Last in, first out: the second process starts only when two adapters are read at once.
        self._free: LifoQueue[ReaderProcess] = LifoQueue()
        for process in reversed(self._processes):
            self._free.put(process)

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read an adapter and keep it in the host tier.

        Raises:
            AdapterError: It cannot be served on this base.
        """
        packed = self._read(name, path)
        self._store.put(packed)
        return packed.version

    def read_again(self, version: AdapterVersion) -> HostAdapter:
        """Bring a known version back into the host tier and return it.

        Raises:
            AdapterError: Its directory is gone or broken, or holds other weights now.
        """
        packed = self._read(version.source, version.source)
        if packed.version.key != version.key:
            raise AdapterError(
                version.source,
                f"its files changed since it was registered (version {version.key[:12]} then, "
                f"{packed.version.key[:12]} now); register it again",
            )
        return self._store.put(packed)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def _read(self, name: str, path: str) -> PackedAdapter:
        process = self._free.get()
        try:
            return process.read(name, path)
        finally:
            self._free.put(process)
