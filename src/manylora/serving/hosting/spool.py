"""Files of adapters that came with requests, in memory: a folder of tmpfs that engines read as they read any other.

::

    request or /dev/shm --copy or move--> /dev/shm/manylora-published-x/7/adapter_model.safetensors, adapter_config.json

So a published adapter meets the same reader, checks and bounds as one on disk, serves every engine of the machine from
one copy, and is there for an engine that starts again. A folder is never written again once it is complete, and is
removed when its version is freed. A server that was killed leaves its folder behind; the next one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from manylora.core.adapters.folder import CONFIG_FILE, WEIGHT_FILES
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound, CapacityError

__all__ = ["SHARED_MEMORY", "AdapterSpool", "SpooledAdapter", "open_shared"]

SHARED_MEMORY = "/dev/shm"
PREFIX = "manylora-published-"
RETRY_S = 1.0

_SHARED_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")


class SpooledAdapter:
    """The folder of an adapter whose weight file is being written; for one thread at a time."""

    def __init__(self, spool: AdapterSpool, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.num_bytes = 0
        self.is_kept = False
        self._spool = spool
        self._file = open(folder / WEIGHT_FILES[0], "xb", buffering=0)  # noqa: SIM115 (until ``close``)

    def write(self, data: bytes) -> None:
        """Append to the weight file; ``CapacityError`` if published adapters take all the memory that they may."""
        with self._taking(len(data)):
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

    def copy(self, descriptor: int, num_bytes: int) -> None:
        """Append the first bytes of an open file; blocks.

        Errors are those of ``write``, and ``AdapterError`` if it was cut meanwhile.
        """
        with self._taking(num_bytes):
            left = num_bytes
            while left:
                num_copied = os.sendfile(self._file.fileno(), descriptor, num_bytes - left, left)
                if not num_copied:
                    raise AdapterError(self.name, f"its file ends at byte {num_bytes - left}, and had {num_bytes}")
                left -= num_copied

    def move(self, file: str, num_bytes: int) -> None:
        """Take a file of shared memory itself, in place of a copy; nothing may write to it any more.

        Errors are those of ``write``, and ``AdapterError`` if the file cannot be moved.
        """
        with self._taking(num_bytes):
            try:
                os.rename(f"{SHARED_MEMORY}/{file}", self.folder / WEIGHT_FILES[0])
            except OSError as error:
                raise AdapterError(self.name, f"{file!r} cannot be moved: {error.strerror}; omit move") from error

    def complete(self, config: bytes) -> str:
        """Add the configuration, and return the folder's path."""
        with self._taking(len(config)):
            (self.folder / CONFIG_FILE).write_bytes(config)
        return str(self.folder)

    @contextlib.contextmanager
    def _taking(self, num_bytes: int) -> Iterator[None]:
        self._spool.take(num_bytes)
        self.num_bytes += num_bytes
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            reason = f"there is no memory left in {self.folder.parent}"
            raise CapacityError(reason, retry_after_s=RETRY_S, status=503) from error

    def close(self) -> None:
        """Close the weight file."""
        self._file.close()


class AdapterSpool:
    """The folders of published adapters, ``max_bytes`` in all, in one for this server that is made in ``parent``."""

    def __init__(self, max_bytes: int, parent: str | None = None) -> None:
        if parent is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
        _remove_abandoned(Path(parent))
        self.path = os.path.realpath(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._num_bytes_of: dict[str, int] = {}
        self._num_made = 0
        self._counting = threading.Lock()
        self._mark = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._mark, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it ends

    @contextlib.contextmanager
    def arriving(self, name: str) -> Iterator[SpooledAdapter]:
        """Make a folder for an adapter; it is removed unless it was ``kept`` inside."""
        self._num_made += 1
        folder = Path(self.path) / str(self._num_made)
        folder.mkdir(mode=0o700)
        adapter = SpooledAdapter(self, name, folder)
        try:
            yield adapter
        finally:
            adapter.close()
            if not adapter.is_kept:
                self._give(adapter.num_bytes)
                shutil.rmtree(folder, ignore_errors=True)

    def keep(self, adapter: SpooledAdapter) -> None:
        """Keep an adapter's folder until ``remove``."""
        adapter.is_kept = True
        self._num_bytes_of[str(adapter.folder)] = adapter.num_bytes

    def remove(self, path: str) -> None:
        """Remove the folder at a path, if it is one of these."""
        if (num_bytes := self._num_bytes_of.pop(path, None)) is not None:
            self._give(num_bytes)
            shutil.rmtree(path, ignore_errors=True)

    def take(self, num_bytes: int) -> None:
        """Count bytes that an adapter is about to add, or raise ``CapacityError``."""
        with self._counting:
            is_full = self.num_bytes + num_bytes > self._max_bytes
            self.num_bytes += 0 if is_full else num_bytes
        if is_full:
            reason = f"published adapters take {self.num_bytes} bytes, and this one needs {num_bytes} more"
            reason += f", of {self._max_bytes} at most (--publish-memory)"
            raise CapacityError(reason, retry_after_s=RETRY_S, status=503)

    def _give(self, num_bytes: int) -> None:
        with self._counting:
            self.num_bytes -= num_bytes

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._mark)


def open_shared(name: str, file: str, prefix: str, max_bytes: int) -> tuple[int, int]:
    """Open a file of shared memory for an adapter; return its descriptor and size.

    No text of ``file``, its name in ``/dev/shm``, is trusted: it must begin with ``prefix``.

    ``AdapterForbidden`` if not, or if it is malformed; ``AdapterNotFound`` if there is no such file; ``AdapterError``
    if it is no regular file (a link is none), or has more than ``max_bytes``.
    """
    if _SHARED_NAME.fullmatch(file) is None or not file.startswith(prefix):
        raise AdapterForbidden(name, f"names in {SHARED_MEMORY} begin with {prefix!r}, and are letters, digits and _.-")
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        descriptor = os.open(f"{SHARED_MEMORY}/{file}", flags)
    except FileNotFoundError:
        raise AdapterNotFound(name, f"there is no {file!r} in {SHARED_MEMORY}") from None
    except OSError as error:
        raise AdapterError(name, f"cannot open {file!r} in {SHARED_MEMORY}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError(name, f"{file!r} in {SHARED_MEMORY} is not a regular file")
        if status.st_size > max_bytes:
            raise AdapterError(name, f"{file!r} has {status.st_size} bytes, at most {max_bytes} are accepted")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's servers that have ended without removing them."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
