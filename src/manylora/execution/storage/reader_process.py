"""A process that reads adapters, so that a decode step never waits for the interpreter lock.

::

    here      (name, path)  ----->  reader   read, check, pack into a memory file
              version, arguments of its layout, descriptor of the file  <-----
              map the file: the image is in host memory, without a copy
    here      a version that was registered  ----->  reader   as above, and the image fills layer by layer
              layout, descriptor, then a number of full pages after each layer  <-----
    here      [(name, path), ...]  ----->  reader   check configurations and headers alone
              for each the number of its shape, its key and digests, or a refusal; the shapes  <-----

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manylora import errors
from manylora.adapters.hash_cache import HashCache, KnownContent
from manylora.adapters.header import HeaderReader
from manylora.adapters.layout import AdapterLayout, lay_out
from manylora.adapters.packed import PackedAdapter, image_of
from manylora.adapters.read import check_directory, read_adapter
from manylora.adapters.read_layers import LayerReader
from manylora.adapters.shape import BaseShape
from manylora.adapters.stamp import provisional_key, stamp_files
from manylora.errors import AdapterError
from manylora.types import AdapterKey, AdapterVersion

if TYPE_CHECKING:
    import subprocess

__all__ = ["ReaderProcess", "ReaderSettings", "main", "serve"]

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
class _Packed:
    """The answer without the image, which follows as a descriptor."""

    version: AdapterVersion
    layout: _LayoutArguments


class _Pages(NamedTuple):
    """A further answer: so many of the image's pages are full.

    The last has the digests of the layers, if the version was read for the first time.
    """

    num_full: int
    layer_digests: bytes = b""


class _Identity(NamedTuple):
    """The fields of a version that are its own: the others are those of its shape."""

    key: AdapterKey
    layer_digests: bytes
    stamp: str


class _Checked(NamedTuple):
    """The versions that differ in more than their content; for each adapter the number of its one and its identity."""

    shapes: list[AdapterVersion]
    adapters: list[tuple[int, _Identity] | _Refused]


@dataclass(frozen=True, slots=True)
class _Refused:
    """The reason why an adapter cannot be served; the engine's process raises it again."""

    error: str
    adapter: str
    reason: str


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

        def version(path: str, found: tuple[int, _Identity] | _Refused) -> AdapterVersion | AdapterError:
            if isinstance(found, _Refused):
                return _error(found)
            shape, (key, layer_digests, stamp) = found
            return replace(answer.shapes[shape], key=key, source=path, layer_digests=layer_digests, stamp=stamp)

        return [version(path, found) for (_, path), found in zip(adapters, answer.adapters, strict=True)]

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
    ) -> bytes:
        """Read a version that was registered, layer by layer; return its digests if it is read for the first time.

        Args:
            version: The version.
            begin: Takes the adapter while its image is still empty; called once, first.
            advance: Takes the number of pages that are full, counted from the first; in the end of all pages.

        Raises:
            AdapterError: It is another version now, it cannot be read, or the process died while it read it.
        """
        digests = b""
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
                        digests = answer.layer_digests
                        advance(answer.num_full)
            except (OSError, EOFError) as error:
                raise self._lost(version.source, error) from error
            except BaseException:
                self._stop()  # further answers are on their way
                raise
        if isinstance(answer, _Refused):
            raise _error(answer)
        return digests

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

    def _receive(self, packed: _Packed, memory: NDArray[np.uint8]) -> PackedAdapter:
        assert self._settings is not None
        layout = self._lay_out(packed.layout)
        return PackedAdapter(packed.version, layout, image_of(memory, layout, self._settings.base.page))

    def _lay_out_again(self, arguments: _LayoutArguments) -> AdapterLayout:
        """Repeat the process's layout, a pure function; adapters of one shape share the result."""
        ranks, dtype, column_scaled = arguments
        assert self._settings is not None
        return lay_out(dict(ranks), self._settings.base, dtype, column_scaled)


def serve(pipe: Connection) -> None:
    """Read and check adapters on request until the pipe closes."""
    try:
        settings: ReaderSettings = pipe.recv()
        served = _Served(pipe, settings)
        while True:
            asked = pipe.recv()
            if isinstance(asked, AdapterVersion):
                served.read_layers(asked)
            elif isinstance(asked, list):
                served.check(asked)
            else:
                served.read(*asked)
    except EOFError:
        return


class _Served:
    """The reading side of a pipe."""

    def __init__(self, pipe: Connection, settings: ReaderSettings) -> None:
        self._pipe = pipe
        self._settings = settings
        self._dtype = settings.dtype or settings.base.page.dtype
        self._hashes = None if settings.hashes is None else HashCache(Path(settings.hashes))
        self._headers = HeaderReader(
            settings.base,
            max_bytes=settings.max_bytes,
            dtype=settings.dtype,
            known=(lambda stamp: None) if self._hashes is None else self._hashes.get,
        )

    def read(self, name: str, path: str) -> None:
        """Read an adapter that is new, and send it or the reason against it."""
        memory = _MemoryFile()
        base = self._settings.base
        try:
            directory = check_directory(name, path)
            stamp, changed_at = stamp_files(name, directory, base, self._dtype)
            packed = read_adapter(
                name,
                directory,
                base,
                max_bytes=self._settings.max_bytes,
                dtype=self._dtype,
                allocate=memory.allocate,
            )
            if stamp_files(name, directory, base, self._dtype)[0] != stamp:
                raise AdapterError(name, "its files changed while they were read; register it again")
        except AdapterError as error:
            self._pipe.send(_refused(error))
        else:
            version = replace(packed.version, stamp=stamp)
            assert version.dtype is not None
            self._keep(stamp, KnownContent(version.key, version.dtype, version.layer_digests), changed_at)
            _send(self._pipe, version, packed.layout, memory)
        finally:
            memory.close()

    def read_layers(self, version: AdapterVersion) -> None:
        """Read a registered version; send its layout and empty image, then the full pages after each layer."""
        memory = _MemoryFile()
        base, name, directory = self._settings.base, version.source, Path(version.source)
        try:
            with LayerReader(
                version, base, max_bytes=self._settings.max_bytes, asked_dtype=self._settings.dtype
            ) as reader:
                image = image_of(memory.allocate(version.host_bytes), reader.layout, base.page)
                _send(self._pipe, version, reader.layout, memory)
                for num_full in reader.pack(image):
                    first = reader.first_content
                    if first is not None:
                        stamp, changed_at = stamp_files(name, directory, base, self._dtype)
                        if provisional_key(stamp) == version.key:
                            self._keep(stamp, first, changed_at)
                    self._pipe.send(_Pages(num_full, b"" if first is None else first.layer_digests))
        except AdapterError as error:
            self._pipe.send(_refused(error))
        finally:
            memory.close()

    def check(self, adapters: Sequence[tuple[str, str]]) -> None:
        """Check adapters by header and send their versions; those of one shape share most of the answer."""
        numbers: dict[AdapterVersion, int] = {}
        found: list[tuple[int, _Identity] | _Refused] = []
        for name, path in adapters:
            try:
                version = self._headers.read(name, path)
            except AdapterError as error:
                found.append(_refused(error))
            else:
                shape = replace(version, key=AdapterKey(""), source="", layer_digests=b"", stamp="")
                identity = _Identity(version.key, version.layer_digests, version.stamp)
                found.append((numbers.setdefault(shape, len(numbers)), identity))
        self._pipe.send(_Checked(list(numbers), found))

    def _keep(self, stamp: str, content: KnownContent, changed_at: float) -> None:
        if self._hashes is not None:
            self._hashes.put(stamp, content, age_s=time.time() - changed_at)


def _send(pipe: Connection, version: AdapterVersion, layout: AdapterLayout, memory: _MemoryFile) -> None:
    parts = [part for group in layout.groups.values() for part in group.modules]
    ranks = tuple((part.module.name, part.rank) for part in parts)
    column_scaled = tuple(part.module.name for part in parts if part.column_scale)
    pipe.send(_Packed(version, (ranks, layout.dtype, column_scaled)))
    send_handle(pipe, memory.descriptor, os.getppid())


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
