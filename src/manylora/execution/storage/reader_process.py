"""A process that reads adapters, so that a decode step never waits for the interpreter lock.

::

    here      read (name, path)  ----->  reader   read, check, pack into a memory file
              version, arguments of its layout, descriptor of the file  <-----
              map the file: the image is in host memory, without a copy

    here      check [(name, path), ...]  ----->  reader   configurations and headers alone
              for each the number of its shape and its key, or a refusal; the shapes  <-----

The process starts with the first adapter, or earlier (``start``), and ends when the pipe closes. It runs at a lower
priority, since loading may take longer but tokens may not. If a file kills it (by memory use or a crash), that adapter
is refused by name, and the next one starts another process.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from manylora import errors
from manylora.adapters.hash_cache import HashCache, KnownContent
from manylora.adapters.header import HeaderReader
from manylora.adapters.layout import AdapterLayout, lay_out
from manylora.adapters.packed import PackedAdapter, image_of
from manylora.adapters.read import check_directory, read_adapter
from manylora.adapters.shape import BaseShape
from manylora.adapters.stamp import stamp_files
from manylora.errors import AdapterError
from manylora.types import AdapterKey, AdapterVersion

if TYPE_CHECKING:
    import subprocess

__all__ = ["ReadAdapter", "ReaderProcess", "ReaderSettings", "main", "serve"]

logger = logging.getLogger(__name__)

NICENESS = 10

_LayoutArguments = tuple[tuple[tuple[str, int], ...], str, tuple[str, ...]]
"""Ranks by module, type of the weights, and the modules with a column scale: the arguments of ``lay_out``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """The settings of every reader process of an engine.

    Args:
        base: The base model.
        max_bytes: Largest weight file accepted.
        dtype: Type of the packed weights, as of ``read_adapter``.
        hashes: File of the hash cache; ``None`` for none.
    """

    base: BaseShape
    max_bytes: int
    dtype: str | None = None
    hashes: str | None = None


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read, and the stamp of its files."""

    packed: PackedAdapter
    stamp: str


@dataclass(frozen=True, slots=True)
class _Read:
    """Read an adapter, and pack it as a type if it was registered with one."""

    name: str
    path: str
    packed_as: str | None


_Check: TypeAlias = list[tuple[str, str]]
"""Check adapters by header: names and paths."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """The answer without the image, which follows as a descriptor."""

    version: AdapterVersion
    layout: _LayoutArguments
    chosen_dtype: str
    stamp: str


@dataclass(frozen=True, slots=True)
class _Refused:
    """The reason why an adapter cannot be served; the engine's process raises it again."""

    error: str
    adapter: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Checked:
    """The versions that differ in more than key and source, and for each adapter its one and its key."""

    shapes: list[AdapterVersion]
    adapters: list[tuple[int, AdapterKey] | _Refused]


class ReaderProcess:
    """Reads one adapter at a time in a process of its own; blocks, safe from any thread.

    ``configure`` comes before the first adapter: the process may start before the settings are known.
    """

    def __init__(self) -> None:
        self._settings: ReaderSettings | None = None
        self._is_configured = False  # the running process
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lay_out = lru_cache(maxsize=256)(self._lay_out_again)

    def start(self) -> None:
        """Start the process, which takes a quarter of a second, without waiting for it."""
        with self._lock:
            self._start()

    def configure(self, settings: ReaderSettings) -> None:
        """Set the settings; once."""
        assert self._settings is None
        self._settings = settings

    def read(self, name: str, path: str, packed_as: str | None = None) -> ReadAdapter:
        """Return the adapter in ``path``, packed as of ``read_adapter``.

        Raises:
            AdapterError: It cannot be served on this base, its files changed meanwhile, or the process died.
        """
        with self._lock:
            try:
                pipe = self._running()
                pipe.send(_Read(name, path, packed_as))
                answer = pipe.recv()
                if isinstance(answer, _Packed):
                    return self._receive(answer, _map(recv_handle(pipe)))
            except (OSError, EOFError) as error:
                raise self._lost(name, error) from error
        assert isinstance(answer, _Refused)
        raise _error(answer)

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Return the version of each adapter by name and path, from its header alone, or the reason against it."""
        with self._lock:
            try:
                pipe = self._running()
                pipe.send(list(adapters))
                answer = pipe.recv()
            except (OSError, EOFError) as error:
                answer = self._lost(adapters[0][0], error)
        if isinstance(answer, AdapterError):  # each by itself, so that the one at fault is refused alone
            return [answer] if len(adapters) == 1 else [one for each in adapters for one in self.check([each])]
        assert isinstance(answer, _Checked)
        return [
            _error(found)
            if isinstance(found, _Refused)
            else replace(answer.shapes[found[0]], key=found[1], source=path)
            for (_, path), found in zip(adapters, answer.adapters, strict=True)
        ]

    def close(self) -> None:
        """End the process; the next read would start another."""
        with self._lock:
            self._stop()

    def _running(self) -> Connection:
        """Return the pipe to a live process; replace one that died since its last answer."""
        if self._process is not None and self._process.poll() is not None:
            logger.warning("reader_process_restarted exit_code=%d", self._process.returncode)
            self._stop()
        pipe = self._pipe or self._start()
        if not self._is_configured:
            assert self._settings is not None, "configure comes first"
            pipe.send(self._settings)
            self._is_configured = True
        return pipe

    def _lost(self, name: str, error: Exception) -> AdapterError:
        """Stop a process that does not answer, and return the error for the adapter that it read."""
        logger.warning("reader_process_lost adapter=%s error=%r", name, error)
        self._stop()
        return AdapterError(
            name, "the process that reads adapters died while it read this one; its files may be broken"
        )

    def _start(self) -> Connection:
        import subprocess  # here, since the reader process does not need it and starts sooner without

        here, there = Pipe()
        # -P keeps the working directory off the import path. With `-m`, the classes of `__main__` would not be ours.
        command = [sys.executable, "-P", "-c", f"import {__name__} as here; here.main({there.fileno()})"]
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        there.close()
        self._pipe = here
        self._is_configured = False
        return here

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _receive(self, packed: _Packed, memory: NDArray[np.uint8]) -> ReadAdapter:
        assert self._settings is not None
        layout = self._lay_out(packed.layout)
        image = image_of(memory, layout, self._settings.base.page)
        return ReadAdapter(PackedAdapter(packed.version, layout, image, packed.chosen_dtype), packed.stamp)

    def _lay_out_again(self, arguments: _LayoutArguments) -> AdapterLayout:
        """Repeat the process's layout, a pure function; adapters of one shape share the result."""
        ranks, dtype, column_scaled = arguments
        assert self._settings is not None
        return lay_out(dict(ranks), self._settings.base, dtype, column_scaled)


def serve(pipe: Connection) -> None:
    """Read and check adapters on request until the pipe closes."""
    try:
        settings: ReaderSettings = pipe.recv()
        hashes = None if settings.hashes is None else HashCache(Path(settings.hashes))
        headers = HeaderReader(
            settings.base,
            max_bytes=settings.max_bytes,
            dtype=settings.dtype,
            known=(lambda stamp: None) if hashes is None else hashes.get,
        )
        while True:
            asked = pipe.recv()
            if isinstance(asked, _Read):
                _read(pipe, asked, settings, hashes)
            else:
                pipe.send(_check(asked, headers))
    except EOFError:
        return


def _read(pipe: Connection, asked: _Read, settings: ReaderSettings, hashes: HashCache | None) -> None:
    """Read and pack an adapter, and send it or the reason against it."""
    memory = _MemoryFile()
    base, dtype = settings.base, settings.dtype or settings.base.page.dtype
    try:
        directory = check_directory(asked.name, asked.path)
        stamp, changed_at = stamp_files(asked.name, directory, base, dtype)
        packed = read_adapter(
            asked.name,
            directory,
            base,
            max_bytes=settings.max_bytes,
            dtype=dtype,
            packed_as=asked.packed_as,
            allocate=memory.allocate,
        )
        if stamp_files(asked.name, directory, base, dtype)[0] != stamp:
            raise AdapterError(asked.name, "its files changed while they were read; register it again")
    except AdapterError as error:
        pipe.send(_refused(error))
    else:
        if hashes is not None:
            content = KnownContent(packed.version.key, packed.chosen_dtype)
            hashes.put(stamp, content, age_s=time.time() - changed_at)
        parts = [part for group in packed.layout.groups.values() for part in group.modules]
        ranks = tuple((part.module.name, part.rank) for part in parts)
        column_scaled = tuple(part.module.name for part in parts if part.column_scale)
        arguments = ranks, packed.layout.dtype, column_scaled
        pipe.send(_Packed(packed.version, arguments, packed.chosen_dtype, stamp))
        send_handle(pipe, memory.descriptor, os.getppid())
    finally:
        memory.close()


def _check(adapters: _Check, headers: HeaderReader) -> _Checked:
    """Check adapters by header; those of one shape share most of the answer."""
    numbers: dict[AdapterVersion, int] = {}
    found: list[tuple[int, AdapterKey] | _Refused] = []
    for name, path in adapters:
        try:
            version = headers.read(name, path)
        except AdapterError as error:
            found.append(_refused(error))
        else:
            shape = replace(version, key=AdapterKey(""), source="")
            found.append((numbers.setdefault(shape, len(numbers)), version.key))
    return _Checked(list(numbers), found)


def _refused(error: AdapterError) -> _Refused:
    return _Refused(type(error).__name__, error.adapter, error.reason)


def _error(refused: _Refused) -> AdapterError:
    kind: type[AdapterError] = getattr(errors, refused.error)
    return kind(refused.adapter, refused.reason)


class _MemoryFile:
    """Memory that another process can map: an anonymous file."""

    def __init__(self) -> None:
        self.descriptor = -1

    def allocate(self, num_bytes: int) -> mmap.mmap:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("manylora-adapter")
        else:
            import tempfile

            self.descriptor, path = tempfile.mkstemp()
            os.unlink(path)
        os.ftruncate(self.descriptor, num_bytes)
        return mmap.mmap(self.descriptor, num_bytes)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _map(descriptor: int) -> NDArray[np.uint8]:
    """Map a memory file and close it: Python's own mapping would keep a descriptor open for each adapter."""
    import torch  # here, since the reader process starts sooner without

    try:
        size = os.fstat(descriptor).st_size
        bits: NDArray[np.uint8] = torch.from_file(
            f"/dev/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
        ).numpy()
        return bits
    finally:
        os.close(descriptor)


def main(descriptor: int) -> None:
    """Run the reader process at the other end of a pipe."""
    os.nice(NICENESS)
    serve(Connection(descriptor))
