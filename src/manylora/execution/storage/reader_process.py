"""Reading adapters in a process of its own, so that a decode step never waits for the interpreter lock.

Checking a file, hashing it and laying its weights out is seconds of work for a large adapter, much of it in calls that
hold the lock which every step needs some hundred times. So whoever serves lets a helper do it::

    here      (name, path)  ----->  helper   read, check, pack into a memory file
              version, layout's key, descriptor of the file  <-----
              map the file: the image is in host memory, and nothing was copied

The helper starts with the first adapter it is asked for and ends when the pipe closes. It runs at a lower priority:
loading may take a little longer, tokens may not. If it dies, the adapter is read here and the next one starts another.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle

from manylora import errors
from manylora.adapters.layout import AdapterLayout, lay_out
from manylora.adapters.packed import PackedAdapter, image_of
from manylora.adapters.read import read_adapter
from manylora.adapters.shape import BaseShape
from manylora.errors import AdapterError
from manylora.types import AdapterVersion

__all__ = ["PackingProcess", "main", "serve"]

logger = logging.getLogger(__name__)

NICENESS = 10


@dataclass(frozen=True, slots=True)
class _Packed:
    """What the helper answers: everything but the image, which follows as a descriptor."""

    version: AdapterVersion
    ranks: tuple[tuple[str, int], ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why an adapter cannot be served, to be raised again by name."""

    error: str
    adapter: str
    reason: str


class PackingProcess:
    """Reads adapters elsewhere. Safe from any thread, which it blocks; one adapter at a time.

    Args:
        base: The base they must fit.
        max_bytes: Largest weight file accepted.
        dtype: Type to keep weights in, as in ``read_adapter``.
    """

    def __init__(self, base: BaseShape, *, max_bytes: int, dtype: str | None) -> None:
        self._base = base
        self._options = (max_bytes, dtype)
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lay_out = lru_cache(maxsize=256)(self._lay_out_again)

    def read(self, name: str, path: str) -> PackedAdapter | None:
        """Return the adapter in ``path``, ``None`` if the helper died over it or cannot be started.

        Raises:
            AdapterError: It cannot be served on this base; says why.
        """
        with self._lock:
            try:
                pipe = self._pipe or self._start()
                pipe.send((name, path))
                answer = pipe.recv()
                if isinstance(answer, _Packed):
                    return self._receive(answer, _map(recv_handle(pipe)))
            except (OSError, EOFError) as error:
                logger.warning("packing_process_lost adapter=%s error=%r", name, error)
                self._stop()
                return None
        assert isinstance(answer, _Refused)
        kind: type[AdapterError] = getattr(errors, answer.error)
        raise kind(answer.adapter, answer.reason)

    def close(self) -> None:
        """End the helper."""
        with self._lock:
            self._stop()

    def _start(self) -> Connection:
        here, there = Pipe()
        # -P: what lies in the directory that we were started from is not for importing.
        # Not `-m`: run as a main module, its classes would be others than ours.
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

    def _receive(self, packed: _Packed, memory: mmap.mmap) -> PackedAdapter:
        layout = self._lay_out(packed.ranks, packed.dtype)
        return PackedAdapter(packed.version, layout, image_of(memory, layout, self._base.page))

    def _lay_out_again(self, ranks: tuple[tuple[str, int], ...], dtype: str) -> AdapterLayout:
        """Lay out what the helper laid out: it is a pure function, and adapters of one shape share the answer."""
        return lay_out(dict(ranks), self._base, dtype)


def serve(pipe: Connection) -> None:
    """Read what the pipe asks for until it closes: the helper's whole life."""
    base, max_bytes, dtype = pipe.recv()
    while True:
        try:
            name, path = pipe.recv()
        except EOFError:
            return
        memory = _MemoryFile()
        try:
            packed = read_adapter(name, path, base, max_bytes=max_bytes, dtype=dtype, allocate=memory.allocate)
        except AdapterError as error:
            pipe.send(_Refused(type(error).__name__, error.adapter, error.reason))
        else:
            ranks = tuple((m.module.name, m.rank) for g in packed.layout.groups.values() for m in g.modules)
            pipe.send(_Packed(packed.version, ranks, packed.layout.dtype))
            send_handle(pipe, memory.descriptor, os.getppid())
        finally:
            memory.close()


class _MemoryFile:
    """Memory that another process can map: a file without a name."""

    def __init__(self) -> None:
        self.descriptor = -1

    def allocate(self, num_bytes: int) -> mmap.mmap:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("manylora-adapter")
        else:
            self.descriptor, path = tempfile.mkstemp()
            os.unlink(path)
        os.ftruncate(self.descriptor, num_bytes)
        return mmap.mmap(self.descriptor, num_bytes)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _map(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def main(descriptor: int) -> None:
    """Be the helper at the other end of a pipe."""
    os.nice(NICENESS)
    serve(Connection(descriptor))
