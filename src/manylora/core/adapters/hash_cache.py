"""Content hashes of adapters that were read before, in a file, so that the next start need not read their weights.

The file has a line per read: the file key of the files (``identity``), the content hash, the chosen type of the
weights, the digests of the layers, and a checksum. Lines are only appended, each in one write, so that several
processes may share the file. A line that is torn or damaged is passed over. When the file has grown to twice its
entries, a start replaces it by one with the newest entries; a line that another process appends in that moment is lost,
and its adapter is read once more.
"""

from __future__ import annotations

import logging
import os
import zlib
from base64 import b64decode, b64encode
from pathlib import Path
from typing import NamedTuple

from manylora.core.adapters.shape import ELEMENT_BYTES
from manylora.core.types import AdapterKey

__all__ = ["SETTLED_S", "HashCache", "KnownContent"]

logger = logging.getLogger(__name__)

MAX_ENTRIES = 200_000
MAX_BYTES = 64 * 1024 * 1024  # no line is appended beyond it, and no file beyond it is read
SLACK_LINES = 1000
SETTLED_S = 2.0
"""Age of the files from which on their times are sure to change with their content: a file system counts in ticks."""


class KnownContent(NamedTuple):
    """The content hash of an adapter, the type that its weights call for, and the digests of its layers."""

    key: AdapterKey
    dtype: str
    layer_digests: bytes = b""


class HashCache:
    """Content by file key. Every fault of the file is logged and costs a read of weights, never an error.

    The file and its folder are made with the first entry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, KnownContent] | None = None  # read at the first question
        self._file: int | None = None

    def open(self) -> int | None:
        """Read the file, and keep it open for entries: for a process that will open no more files.

        Entries go astray once another process has replaced the file, and their adapters are read once more.

        Returns:
            Its descriptor; ``None`` if it cannot be opened.
        """
        self._known = self._read()
        try:
            self._file = self._open()
        except OSError as error:
            logger.warning("hash_cache_not_written path=%s error=%s", self._path, error)
        return self._file

    def get(self, file_key: str) -> KnownContent | None:
        """Return the content of the files with this file key, if it is known."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(file_key)

    def put(self, file_key: str, content: KnownContent, *, age_s: float) -> None:
        """Record the content of files that were last changed ``age_s`` seconds ago; files just written are left out."""
        if age_s < SETTLED_S or self.get(file_key) == content:
            return
        assert self._known is not None
        self._known[file_key] = content
        try:
            fd = self._open() if self._file is None else self._file
            try:
                if os.fstat(fd).st_size < MAX_BYTES:
                    os.write(fd, _line(file_key, content))
            finally:
                if fd != self._file:
                    os.close(fd)
        except OSError as error:
            logger.warning("hash_cache_not_written path=%s error=%s", self._path, error)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)

    def _read(self) -> dict[str, KnownContent]:
        known: dict[str, KnownContent] = {}
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                lines = file.read(MAX_BYTES).splitlines()
        except FileNotFoundError:
            return known
        except OSError as error:
            logger.warning("hash_cache_ignored path=%s error=%s", self._path, error)
            return known
        num_damaged = 0
        for line in lines:
            entry = _parse(line)
            if entry is None:
                num_damaged += 1
            else:
                file_key, content = entry
                known.pop(file_key, None)  # the newest entries are the last
                known[file_key] = content
        if num_damaged:
            logger.warning("hash_cache_damaged path=%s lines=%d of=%d", self._path, num_damaged, len(lines))
        if len(lines) > 2 * len(known) + SLACK_LINES or len(known) > MAX_ENTRIES:
            known = dict(list(known.items())[-MAX_ENTRIES // 2 :])
            self._replace(known)
        return known

    def _replace(self, known: dict[str, KnownContent]) -> None:
        """Put a new file in the place of the old one, as a whole."""
        try:
            temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            with open(temporary, "wb") as file:
                file.writelines(_line(file_key, content) for file_key, content in known.items())
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning("hash_cache_not_written path=%s error=%s", self._path, error)


def _line(file_key: str, content: KnownContent) -> bytes:
    body = b"%b %b %b %b" % (
        file_key.encode(),
        content.key.encode(),
        content.dtype.encode(),
        b64encode(content.layer_digests),
    )
    return b"%b %08x\n" % (body, zlib.crc32(body))


def _parse(line: bytes) -> tuple[str, KnownContent] | None:
    """Return the entry in a line, ``None`` if it is damaged."""
    body, _, checksum = line.rpartition(b" ")
    parts = body.split(b" ")
    if len(parts) != 4 or checksum != b"%08x" % zlib.crc32(body):
        return None
    file_key, key, dtype = (part.decode("ascii", "replace") for part in parts[:3])
    return (file_key, KnownContent(AdapterKey(key), dtype, b64decode(parts[3]))) if dtype in ELEMENT_BYTES else None
