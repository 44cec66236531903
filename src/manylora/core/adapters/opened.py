"""Files of adapters, open: their bytes by ranges, and the identity by which a change shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from manylora.core.errors import AdapterError

__all__ = ["FileIdentity", "LocalFile", "OpenFile", "WeightSource"]


class FileIdentity(NamedTuple):
    """The identity of a file: as long as it is the same, so is the content.

    Args:
        place: Real path, or URL.
        parts: Of a file on disk: device, inode, size, times of content and inode. Of one in a registry: size, ETag,
            ``Last-Modified``.
        changed_at: Time of the last change, in seconds since the epoch; 0 if no later change can go unnoticed.
    """

    place: str
    parts: tuple[object, ...]
    changed_at: float

    @classmethod
    def of(cls, path: str | Path, status: os.stat_result) -> FileIdentity:
        """Return the identity of a file on disk."""
        times = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return cls(os.path.realpath(path), times, max(status.st_mtime, status.st_ctime))


class WeightSource(Protocol):
    """A weight file; safe from any thread."""

    @property
    def size(self) -> int:
        """Size in bytes, at the time it was opened."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Return a range of it, all of ``length`` bytes. Blocks.

        Raises:
            AdapterError: The range lies beyond its end, or cannot be read.
        """
        ...


class OpenFile(WeightSource, Protocol):
    """A file of an adapter's folder, open."""

    @property
    def identity(self) -> FileIdentity:
        """Its present identity."""
        ...

    @property
    def is_pinned(self) -> bool:
        """Whether a read of bytes that were written after the opening fails."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class LocalFile:
    """An open file on disk, which it closes; an ``OpenFile``. Messages name the adapter ``name``."""

    is_pinned = False

    def __init__(self, name: str, file: BinaryIO, path: str | Path) -> None:
        self._name = name
        self._path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    @property
    def identity(self) -> FileIdentity:
        """Its present identity."""
        return FileIdentity.of(self._path, os.fstat(self.file.fileno()))

    def read(self, offset: int, length: int) -> bytes:
        """Return a range of the file."""
        parts = []
        while length:
            try:
                part = os.pread(self.file.fileno(), length, offset)
            except OSError as error:
                raise AdapterError(self._name, f"cannot read the weight file: {error.strerror}") from error
            if not part:
                raise AdapterError(self._name, f"the weight file is damaged: it ends at byte {offset}")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the file."""
        self.file.close()
