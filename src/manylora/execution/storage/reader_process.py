"""A process that reads adapters, so that a decode step never waits for the interpreter lock.

::

    here      (name, path)  ----->  reader   read, check, pack into a memory file
              version, arguments of its layout, descriptor of the file  <-----
              map the file: the image is in host memory, without a copy
    here      a version that was registered  ----->  reader   as above, and the image fills layer by layer
              layout, descriptor, then a number of full pages after each layer  <-----

The process starts with the first adapter and ends when the pipe closes. It runs at a lower priority, since loading may
take longer but tokens may not. If a file kills it (by memory use or a crash), that adapter is refused by name, and the
next one starts another process.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manylora import errors
from manylora.adapters.layout import AdapterLayout, lay_out
from manylora.adapters.packed import PackedAdapter, image_of
from manylora.adapters.read import read_adapter
from manylora.adapters.read_layers import LayerReader
from manylora.adapters.shape import BaseShape
from manylora.errors import AdapterError
from manylora.types import AdapterVersion

if TYPE_CHECKING:
    import subprocess

__all__ = ["ReaderProcess", "main", "serve"]

logger = logging.getLogger(__name__)

NICENESS = 10

_LayoutArguments = tuple[tuple[tuple[str, int], ...], str, tuple[str, ...]]
"""Ranks by module, type of the weights, and the modules with a column scale: the arguments of ``lay_out``."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """The answer without the image, which follows as a descriptor."""

    version: AdapterVersion
    layout: _LayoutArguments


class _Pages(NamedTuple):
    """A further answer: so many of the image's pages are full."""

    num_full: int


@dataclass(frozen=True, slots=True)
class _Refused:
    """The reason why an adapter cannot be served; the engine's process raises it again."""

    error: str
    adapter: str
    reason: str


class ReaderProcess:
    """Reads one adapter at a time in a process of its own; blocks, safe from any thread. Args are ``HostReader``'s."""

    def __init__(self, base: BaseShape, *, max_bytes: int, dtype: str | None) -> None:
        self._base = base
        self._options = (max_bytes, dtype)
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lay_out = lru_cache(maxsize=256)(self._lay_out_again)

    def read(self, name: str, path: str) -> PackedAdapter:
        """Return the adapter in ``path``.

        Raises:
            AdapterError: It cannot be served on this base, or the process died while it read it.
        """
        with self._lock:
            try:
                pipe = self._running()
                pipe.send((name, path))
                answer = pipe.recv()
                if isinstance(answer, _Packed):
                    return self._receive(answer, _map(recv_handle(pipe)))
            except (OSError, EOFError) as error:
                raise self._lost(name, error) from error
        assert isinstance(answer, _Refused)
        raise _error(answer)

    def read_layers(
        self, version: AdapterVersion, begin: Callable[[PackedAdapter], None], advance: Callable[[int], None]
    ) -> None:
        """Read a version that was registered, layer by layer.

        Args:
            version: The version.
            begin: Takes the adapter while its image is still empty; called once, first.
            advance: Takes the number of pages that are full, counted from the first; in the end of all pages.

        Raises:
            AdapterError: It is another version now, it cannot be read, or the process died while it read it.
        """
        with self._lock:
            try:
                pipe = self._running()
                pipe.send(version)
                answer = pipe.recv()
                if isinstance(answer, _Packed):
                    begin(self._receive(answer, _map(recv_handle(pipe))))
                    answer = _Pages(0)
                while isinstance(answer, _Pages) and answer.num_full < version.num_pages:
                    answer = pipe.recv()
                    if isinstance(answer, _Pages):
                        advance(answer.num_full)
            except (OSError, EOFError) as error:
                raise self._lost(version.source, error) from error
            except BaseException:
                self._stop()  # further answers are on their way
                raise
        if isinstance(answer, _Refused):
            raise _error(answer)

    def close(self) -> None:
        """End the process, and with it a read in progress; the next read would start another."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _running(self) -> Connection:
        """Return the pipe to a live process; replace one that died since its last answer."""
        if self._process is not None and self._process.poll() is not None:
            logger.warning("reader_process_restarted exit_code=%d", self._process.returncode)
            self._stop()
        return self._pipe or self._start()

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
        here.send((self._base, *self._options))
        return here

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _receive(self, packed: _Packed, memory: NDArray[np.uint8]) -> PackedAdapter:
        layout = self._lay_out(packed.layout)
        return PackedAdapter(packed.version, layout, image_of(memory, layout, self._base.page))

    def _lay_out_again(self, arguments: _LayoutArguments) -> AdapterLayout:
        """Repeat the process's layout, a pure function; adapters of one shape share the result."""
        ranks, dtype, column_scaled = arguments
        return lay_out(dict(ranks), self._base, dtype, column_scaled)


def serve(pipe: Connection) -> None:
    """Read adapters on request until the pipe closes."""
    base, max_bytes, dtype = pipe.recv()
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if isinstance(asked, AdapterVersion):
            _read_layers(pipe, asked, base, max_bytes)
            continue
        name, path = asked
        memory = _MemoryFile()
        try:
            packed = read_adapter(name, path, base, max_bytes=max_bytes, dtype=dtype, allocate=memory.allocate)
        except AdapterError as error:
            pipe.send(_Refused(type(error).__name__, error.adapter, error.reason))
        else:
            _send(pipe, packed.version, packed.layout, memory)
        finally:
            memory.close()


def _read_layers(pipe: Connection, version: AdapterVersion, base: BaseShape, max_bytes: int) -> None:
    """Read a registered version; send its layout and empty image, then the full pages after each layer."""
    memory = _MemoryFile()
    try:
        with LayerReader(version, base, max_bytes=max_bytes) as reader:
            image = image_of(memory.allocate(version.host_bytes), reader.layout, base.page)
            _send(pipe, version, reader.layout, memory)
            for num_full in reader.pack(image):
                pipe.send(_Pages(num_full))
    except AdapterError as error:
        pipe.send(_Refused(type(error).__name__, error.adapter, error.reason))
    finally:
        memory.close()


def _send(pipe: Connection, version: AdapterVersion, layout: AdapterLayout, memory: _MemoryFile) -> None:
    parts = [part for group in layout.groups.values() for part in group.modules]
    ranks = tuple((part.module.name, part.rank) for part in parts)
    column_scaled = tuple(part.module.name for part in parts if part.column_scale)
    pipe.send(_Packed(version, (ranks, layout.dtype, column_scaled)))
    send_handle(pipe, memory.descriptor, os.getppid())


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
