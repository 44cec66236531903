"""The reading side of a reader process: confined first, then adapters are read and checked on request.

::

    settings -> hash cache opened -> confined -> question -> read, check, pack into a memory file -> answer, descriptor

Confined, it reads the folders of adapters and Python's own, writes nothing but memory files and the hash cache that is
open, reaches no network, starts no process, and has a bound on its memory. Not every kernel has every measure; the log
names those that are missing.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.hash_cache import HashCache
from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.remote import Registry
from manylora.core.errors import AdapterError
from manylora.core.isolation.confine import READABLE_OF_SYSTEM, Confinement, confine
from manylora.core.isolation.system import STEP_NICENESS
from manylora.core.logs import configure_logging
from manylora.core.types import AdapterVersion
from manylora.execution.storage.adapter_files import AdapterFiles
from manylora.execution.storage.reader_messages import (
    AdapterRefused,
    Again,
    Check,
    Checked,
    Packed,
    Pages,
    ReaderSettings,
    send,
)
from manylora.execution.storage.registry_process import PipedRegistry

__all__ = ["main", "serve"]

logger = logging.getLogger(__name__)

NICENESS = STEP_NICENESS + 10  # of reads that no step waits for: below steps
MAX_CACHE_BYTES = 128 * 1024 * 1024  # largest file that a reader may write, beside the image of an adapter
SCRATCH_BYTES = 64 * 1024 * 1024
"""Largest image that is packed in memory of the reader's own and written to its file from there: memory that is used
again is at hand, whereas a mapping of a new file takes a fault for each page, a third of the time of a read."""
TOLD_EVERY_S = 0.02  # time of checks between two answers, so that many quick ones share an answer


def main(descriptor: int) -> None:
    """Run the reader process at the other end of a pipe."""
    configure_logging(logging.WARNING, "reader")
    pipe = Connection(descriptor)
    try:
        settings: ReaderSettings = pipe.recv()
    except EOFError:
        return
    hashes = None if settings.hashes is None else HashCache(Path(settings.hashes))
    kept = [0, 1, 2, descriptor]
    registry: Registry | None = None
    if settings.registries:
        kept.append(asked := recv_handle(pipe))
        registry = PipedRegistry(Connection(asked))
    if hashes is not None and (file := hashes.open()) is not None:
        kept.append(file)
    if sys.platform == "linux":
        _confine(settings, kept)
    serve(pipe, settings, hashes, registry)


def _confine(settings: ReaderSettings, kept: Sequence[int]) -> None:
    package = str(Path(__file__).resolve().parents[2])
    roots = ("/",) if settings.roots is None else settings.roots
    measures = confine(
        Confinement(
            readable=[*READABLE_OF_SYSTEM, sys.prefix, sys.base_prefix, package, *(p for p in sys.path if p), *roots],
            keep_fds=kept,
            memory_bytes=settings.memory_bytes,
            file_bytes=max(MAX_CACHE_BYTES, settings.memory_bytes),
        )
    )
    for one in measures:
        # A process without root's rights cannot become another user, and has no reason to.
        if not one.is_on and one.name != "user":
            logger.warning("reader_not_confined measure=%s reason=%r", one.name, one.note)


def serve(
    pipe: Connection, settings: ReaderSettings, hashes: HashCache | None = None, registry: Registry | None = None
) -> None:
    """Read and check adapters on request until the pipe closes."""
    answers = _Answers(pipe, AdapterFiles(settings, registry, hashes), settings.base.page.num_bytes)
    try:
        # On Linux a thread has a priority of its own. Elsewhere the whole process has this one from the first work on.
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICENESS,)) as at_low_priority:
            while True:
                asked = pipe.recv()
                if isinstance(asked, Again) and asked.is_urgent:
                    answers.read_layers(asked.version)
                elif isinstance(asked, Again):
                    at_low_priority.submit(answers.read_layers, asked.version).result()
                elif isinstance(asked, Check):
                    at_low_priority.submit(answers.check, *asked).result()
                elif settings.urgent_root is not None and Path(asked[1]).is_relative_to(settings.urgent_root):
                    answers.read(*asked)
                else:
                    at_low_priority.submit(answers.read, *asked).result()
    except EOFError:
        return


class _Answers:
    """Answers the engine's questions about adapters' files."""

    def __init__(self, pipe: Connection, files: AdapterFiles, page_bytes: int) -> None:
        self._pipe = pipe
        self._files = files
        self._page_bytes = page_bytes
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)  # takes memory as far as it is used

    def read(self, name: str, path: str) -> None:
        """Read an adapter that is new, and send it or the reason against it."""
        with self._answering(name), _MemoryFile(self._scratch) as memory:
            packed = self._files.read(name, path, memory.allocate)
            memory.fill(packed.version.host_bytes)
            self._send_image(packed, memory)

    def read_layers(self, version: AdapterVersion) -> None:
        """Read a registered version; send its layout and empty image, then the full pages after each layer."""
        with self._answering(version.source), _MemoryFile(self._scratch) as memory:

            def advance(num_full: int, layer_digests: bytes) -> None:
                memory.fill(num_full * self._page_bytes)
                send(self._pipe, Pages(num_full, layer_digests))

            self._files.read_layers(version, lambda packed: self._send_image(packed, memory), advance, memory.allocate)

    def check(self, adapters: Sequence[tuple[str, str]], is_each: bool) -> None:
        """Check adapters by header and send their versions, some at a time.

        An empty answer comes first, since the process may just have started. An adapter that is slow holds back no
        answer for those before it for long.
        """
        send(self._pipe, Checked.of([]))
        first, sent_at = 0, time.monotonic()
        found: list[AdapterVersion | AdapterError] = []
        for number, (name, path) in enumerate(adapters, 1):
            try:
                with _errors_of(name):
                    found.append(self._files.check(name, path))
            except AdapterError as error:
                found.append(error)
            if is_each or number == len(adapters) or time.monotonic() - sent_at > TOLD_EVERY_S:
                send(self._pipe, Checked.of(found[first:]))
                first, sent_at = number, time.monotonic()

    @contextmanager
    def _answering(self, name: str) -> Iterator[None]:
        """Send the reason if the adapter is refused inside."""
        try:
            with _errors_of(name):
                yield
        except AdapterError as error:
            send(self._pipe, AdapterRefused.of(error))

    def _send_image(self, packed: PackedAdapter, memory: _MemoryFile) -> None:
        send(self._pipe, Packed.of(packed.version, packed.layout))
        send_handle(self._pipe, memory.descriptor, os.getppid())


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Make lack of memory and of descriptors inside an error of the adapter."""
    try:
        yield
    except MemoryError as error:
        raise AdapterError(name, "it needs more memory than a reader of adapters may use") from error
    except ConnectionError:
        raise
    except OSError as error:
        raise AdapterError(name, f"it cannot be read: {error.strerror}") from error


class _MemoryFile:
    """Memory that another process can map: an anonymous file. A small one is prepared in ``scratch``, one at a time."""

    def __init__(self, scratch: NDArray[np.uint8]) -> None:
        self.descriptor = -1
        self._scratch = scratch
        self._unwritten = memoryview(b"")
        self._num_written = 0

    def allocate(self, num_bytes: int) -> mmap.mmap | NDArray[np.uint8]:
        """Make the file, of zeros; return memory for its content, which is valid once ``fill`` was called."""
        if hasattr(os, "memfd_create"):
            # The engine seals its size, so that the memory cannot be taken away under a step.
            self.descriptor = os.memfd_create("manylora-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            import tempfile

            self.descriptor, path = tempfile.mkstemp()
            os.unlink(path)
        os.ftruncate(self.descriptor, num_bytes)
        if num_bytes > len(self._scratch):
            return mmap.mmap(self.descriptor, num_bytes)
        content = self._scratch[:num_bytes]
        content.fill(0)
        self._unwritten = content.data
        return content

    def fill(self, num_bytes: int) -> None:
        """Write the first ``num_bytes`` of the content to the file, unless the file is mapped."""
        while part := self._unwritten[: num_bytes - self._num_written]:
            num_now = os.pwrite(self.descriptor, part, self._num_written)
            self._unwritten = self._unwritten[num_now:]
            self._num_written += num_now

    def __enter__(self) -> _MemoryFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
