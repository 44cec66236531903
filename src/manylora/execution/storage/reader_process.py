"""A process that reads adapters, so that a decode step never waits for the interpreter lock.

::

    here      (name, path)  ----->  reader   read, check, pack into a memory file
              version, arguments of its layout, descriptor of the file  <-----
              map the file: the image is in host memory, without a copy
    here      a version that was registered  ----->  reader   as above, and the image fills layer by layer
              layout, descriptor, then a number of full pages after each layer  <-----
    here      [(name, path), ...]  ----->  reader   check configurations and headers only, in order
              some at a time: the number of its shape, its key and digests, or a refusal; the shapes  <-----

The process starts with the first adapter, or earlier (``start``), and ends when the pipe closes. It works at a lower
priority, since loading may take longer but tokens may not. An *urgent* read is an exception: a step waits for its
layers, and on busy cores a read of lower priority would get little time.

The process may die. It is confined before it opens a file (``reader_service``), and its memory is bounded. If a file
kills it, or takes longer than ``ReaderSettings.limit_s``, that adapter is refused by name, and the next one starts
another process.

It has no network. Where registries are allowed, a further process asks them for it (``registry_process``), and their
lives end together.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.layout import lay_out
from manylora.core.adapters.packed import PackedAdapter, image_of
from manylora.core.adapters.sources import is_url, pinned
from manylora.core.errors import AdapterError, AdapterUnavailable, CapacityError
from manylora.core.isolation.confine import ONE_THREAD, start_on_pipe
from manylora.core.types import AdapterVersion
from manylora.execution.storage.reader_messages import (
    Again,
    Answer,
    Check,
    Checked,
    Packed,
    Pages,
    ReaderSettings,
    ask,
    receive,
)
from manylora.execution.storage.registry_process import RegistryTerms, start_registry

if TYPE_CHECKING:
    import subprocess

    from manylora.execution.storage.shared_images import PublishedFolder

__all__ = ["ReaderProcess"]

logger = logging.getLogger(__name__)

SERVICE = "manylora.execution.storage.reader_service"
RETRIES_S = (0.1, 0.5, 2.0, 5.0)
"""Waits between attempts to start a process, which may fail for lack of descriptors, processes or memory."""
CHECK_S = 10.0
"""Time for a header: two requests to a registry, each tried again as long as a server may take to come back."""
SLOW_CHECKS_S = 60.0
HURRIED_CHECK_S = 2.0  # time for a header once headers that timed out took ``SLOW_CHECKS_S``: a start must end


class ReaderProcess:
    """Reads one adapter at a time in a process of its own; blocks, safe from any thread.

    ``configure`` comes before the first adapter: the process may start before the settings are known.
    """

    def __init__(self) -> None:
        self._is_configured = False  # the running process
        self._roots: list[tuple[int, int] | None] = []  # identities of the folders that it may read
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._registry: subprocess.Popen[bytes] | None = None
        self._slow_s = 0.0  # time of checks that timed out
        self._is_closed = False

    def start(self) -> None:
        """Start the process, which takes a quarter of a second, without waiting for it."""
        with self._lock:
            self._start()

    def configure(self, settings: ReaderSettings) -> None:
        """Set the settings; once, before all but ``start``."""
        self._settings = settings

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Return the version of each adapter by name and path, from its header, or the reason against it.

        A header costs a millisecond, or a few requests to a registry. One that takes seconds is refused without the
        others. A folder with many such headers delays a start by little: then later headers have less time.
        ``CapacityError`` if no process could be started.
        """
        found: list[AdapterVersion | AdapterError] = []
        is_each = False
        with self._lock:
            while len(found) < len(adapters):
                pipe = self._running()
                # A header has less time once headers have taken much of this engine's.
                limit_s = min(CHECK_S if self._slow_s < SLOW_CHECKS_S else HURRIED_CHECK_S, self._settings.limit_s)
                try:
                    ask(pipe, Check(adapters[len(found) :], is_each), limit_s)
                    self._receive(pipe)  # it runs
                    while len(found) < len(adapters):
                        answer, asked = receive(pipe, limit_s), adapters[len(found) :]
                        if not isinstance(answer, Checked) or not 0 < len(answer.shape_of) <= len(asked):
                            raise OSError("its answer is malformed")
                        found += _versions(answer, asked[: len(answer.shape_of)])
                except OSError as error:
                    if isinstance(error, TimeoutError):
                        self._slow_s += limit_s
                    name, path = adapters[len(found)]
                    lost = self._lost(name, path, error, limit_s)
                    if is_each:
                        found.append(lost)
                    is_each = True  # before, the one at fault may be any of those without an answer
        return found

    def read(self, name: str, path: str, folder: PublishedFolder | None = None) -> PackedAdapter:
        """Return the adapter in ``path``; of a published one, the image that another engine has packed if there is one.

        ``AdapterError`` if the adapter cannot be served on this base, or the process died while it read it;
        ``CapacityError`` if no process could be started.
        """
        with self._lock:
            if folder is not None and (found := folder.find()) is not None:
                with suppress(OSError):  # of another size: it is read here
                    return self._take_image(*found)
            pipe = self._running()
            try:
                ask(pipe, (name, path), self._settings.limit_s)
                answer = self._receive(pipe)
                if isinstance(answer, Packed):
                    return self._receive_image(pipe, answer, folder)
            except OSError as error:
                raise self._lost(name, path, error) from error
        raise _refusal(name, answer)

    def read_layers(
        self,
        version: AdapterVersion,
        begin: Callable[[PackedAdapter], None],
        advance: Callable[[int], None],
        *,
        is_urgent: bool = False,
    ) -> bytes:
        """Read a version that was registered, layer by layer; return its digests if it is read for the first time.

        ``begin`` and ``advance`` are as in ``AdapterFiles.read_layers``. ``is_urgent`` is whether it is read at the
        priority of steps. ``AdapterError`` also if the process died; ``CapacityError`` if none could be started.
        """
        digests = b""
        with self._lock:
            pipe = self._running()
            try:
                ask(pipe, Again(version, is_urgent), self._settings.limit_s)
                answer = self._receive(pipe)
                if isinstance(answer, Packed):
                    begin(self._receive_image(pipe, answer))
                    answer = Pages(0)
                while isinstance(answer, Pages) and answer.num_full < version.num_pages:
                    answer = self._receive(pipe)
                    if isinstance(answer, Pages):
                        digests = answer.layer_digests
                        advance(min(answer.num_full, version.num_pages))
            except OSError as error:
                raise self._lost(version.source, version.source, error) from error
            except BaseException:
                self._stop()  # further answers are on their way
                raise
        if not isinstance(answer, Pages):
            raise _refusal(version.source, answer)
        return digests

    def close(self) -> None:
        """End the process, and with it a read in progress; the next read would start another."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _running(self) -> Connection:
        """Return the pipe to a live process; replace one that died since its last answer."""
        for wait_s in (*RETRIES_S, None):
            try:
                for process in (self._process, self._registry):
                    if process is not None and process.poll() is not None:
                        logger.warning("reader_process_restarted exit_code=%d", process.returncode)
                        self._stop()
                roots = [_identity(root) for root in self._settings.roots or ()]
                if self._is_configured and roots != self._roots:
                    logger.info("reader_process_restarted reason='a folder of adapters was replaced'")
                    self._stop()
                pipe = self._pipe or self._start()
                if not self._is_configured:
                    self._roots = roots
                    self._send_settings(pipe)
                    self._is_configured = True
                return pipe
            except OSError as error:
                logger.warning(
                    "reader_process_not_started error=%r retry_in_s=%s", error.strerror or str(error), wait_s
                )
                self._stop()
                if wait_s is None:
                    reason = f"The process that reads adapters could not be started: {error.strerror or error}"
                    raise CapacityError(reason, status=503) from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _send_settings(self, pipe: Connection) -> None:
        """Send the settings, and behind them a pipe to a process that asks registries if any are allowed."""
        assert self._process is not None
        ask(pipe, self._settings, self._settings.limit_s)
        if self._settings.registries:
            self._registry, end = start_registry(RegistryTerms.of(self._settings))
            with end:
                send_handle(pipe, end.fileno(), self._process.pid)

    def _receive(self, pipe: Connection) -> Answer:
        return receive(pipe, self._settings.limit_s)

    def _lost(self, name: str, path: str, error: OSError, limit_s: float | None = None) -> AdapterError:
        """Stop a process that does not answer, and return the error for the adapter that it read."""
        self._stop()
        if self._is_closed:
            return AdapterError(name, "the engine is closing")
        logger.warning("reader_process_lost adapter=%r error=%r", name, error)
        if isinstance(error, TimeoutError):
            limit_s = self._settings.limit_s if limit_s is None else limit_s
            reason = f"reading it took longer than {limit_s:g} s, and was given up"
            if is_url(path):
                return AdapterUnavailable(name, reason)
        elif isinstance(error, ConnectionError):
            reason = "the process that reads adapters died while it read this one; its files may be broken"
        else:
            reason = f"it could not be taken over from the process that reads adapters: {error.strerror or error}"
        return AdapterError(name, reason)

    def _start(self) -> Connection:
        self._process, self._pipe = start_on_pipe(SERVICE, ONE_THREAD)  # with several it could not be confined
        return self._pipe

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        for process in (self._process, self._registry):
            if process is not None:
                process.kill()
                process.wait()
        self._process = self._registry = None
        self._is_configured = False

    def _receive_image(self, pipe: Connection, packed: Packed, folder: PublishedFolder | None = None) -> PackedAdapter:
        if not pipe.poll(self._settings.limit_s):
            raise TimeoutError
        try:
            descriptor = recv_handle(pipe)
        except EOFError as error:
            raise ConnectionResetError from error
        except RuntimeError as error:  # this process has no descriptor left for it
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
        try:
            adapter = self._take_image(packed, os.dup(descriptor))
            if folder is not None and not adapter.layout.needs_base:  # such a one is settled in place, by each engine
                folder.offer(packed, os.dup(descriptor))
            return adapter
        finally:
            os.close(descriptor)

    def _take_image(self, packed: Packed, descriptor: int) -> PackedAdapter:
        """Map an image; the descriptor is closed."""
        base, page = self._settings.base, self._settings.base.page
        layout = lay_out(dict(packed.ranks), base, packed.dtype, packed.vectors, packed.replaced)  # as in the process
        memory = _map(descriptor, layout.num_pages * page.num_bytes)
        return PackedAdapter(packed.version, layout, image_of(memory, layout, page))


def _identity(folder: str) -> tuple[int, int] | None:
    """Return the identity of a folder: a confined process may read that folder, but none that takes its place."""
    try:
        status = os.lstat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _versions(checked: Checked, adapters: Sequence[tuple[str, str]]) -> Iterable[AdapterVersion | AdapterError]:
    identities, refused = iter(checked.identities), iter(checked.refused)
    for (_, path), number in zip(adapters, checked.shape_of, strict=True):
        if number < 0:
            yield next(refused).to_error()
        else:
            key, layer_digests, file_key, url = next(identities)
            shape = checked.shapes[number]
            yield replace(shape, key=key, source=pinned(path, url), layer_digests=layer_digests, file_key=file_key)


def _refusal(name: str, answer: Answer) -> AdapterError:
    if isinstance(answer, Pages | Packed | Checked):
        return AdapterError(name, "the process that reads adapters gave another answer than was asked for")
    return answer.to_error()


def _map(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map a memory file of so many bytes and close it: Python's own mapping would keep a descriptor open for each.

    Its size is sealed first: pages that the reader took away would kill a step. ``OSError`` if the file has another
    size.
    """
    import torch  # here, since a test of this module does without

    try:
        if sys.platform == "linux":
            import fcntl

            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise OSError(f"its image has {size} bytes, expected {num_bytes}")
        bits: NDArray[np.uint8] = torch.from_file(
            f"/dev/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
        ).numpy()
        return bits
    except RuntimeError as error:  # of torch: no descriptor is left, or no memory
        raise OSError(str(error).partition("\n")[0]) from error
    finally:
        os.close(descriptor)
