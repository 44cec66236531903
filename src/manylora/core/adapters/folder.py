"""An adapter's folder, of which a tenant may write every file, and change it at any time: its files and configuration.

Only regular files are opened (a FIFO would block a thread). Sizes are limited before bytes are read. Nothing is
memory-mapped: truncating a mapped file kills the process, while a short read raises an error. The configuration is
small and valid JSON, or refused; the adapter's method interprets it.

Links are followed, since the Hugging Face cache consists of them. Where *roots* are given, the file that was opened is
looked at, not its path: a link that is put in place between a check and the opening leads nowhere.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, Protocol

from manylora.core.errors import AdapterError, AdapterForbidden

__all__ = [
    "CONFIG_FILE",
    "MAX_CONFIG_BYTES",
    "WEIGHT_FILES",
    "AdapterFolder",
    "FileIdentity",
    "Folder",
    "LocalFile",
    "OpenFile",
    "leads_outside",
    "lies_in",
    "open_regular",
    "parse_config",
    "read_config",
    "read_config_file",
    "real_roots",
    "shown",
    "unique_pairs",
]

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""In PEFT's order: the first that exists is read. If it is damaged, the adapter is refused."""

MAX_CONFIG_BYTES = 1024 * 1024


class FileIdentity(NamedTuple):
    """The identity of a file: as long as it is the same, so is the content."""

    place: str  # real path, or URL
    # Of a file on disk: device, inode, size, times of content and inode. Of one in a registry: size, ETag,
    # ``Last-Modified``.
    parts: tuple[object, ...]
    changed_at: float  # time of the last change, in seconds since the epoch; 0 if no later change can go unnoticed

    @classmethod
    def of(cls, path: str | Path, status: os.stat_result) -> FileIdentity:
        """Return the identity of a file on disk."""
        times = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return cls(os.path.realpath(path), times, max(status.st_mtime, status.st_ctime))


class OpenFile(Protocol):
    """A file of an adapter's folder, open; safe from any thread."""

    @property
    def size(self) -> int:
        """Size in bytes, at the time it was opened."""

    @property
    def identity(self) -> FileIdentity:
        """Its present identity."""

    @property
    def is_pinned(self) -> bool:
        """Whether a read of bytes that were written after the opening fails."""

    def read(self, offset: int, length: int) -> bytes:
        """Return a range of it, all of ``length`` bytes. Blocks.

        ``AdapterError`` if the range lies beyond its end, or cannot be read.
        """

    def close(self) -> None:
        """Close the file."""


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


class Folder(Protocol):
    """The folder of an adapter, for its files to be opened."""

    @property
    def name(self) -> str:
        """The adapter, for messages."""

    @property
    def place(self) -> str:
        """Its path or URL."""

    def read(self, file: str, max_bytes: int) -> bytes:
        """Return the content of a small file, of at most ``max_bytes`` bytes; errors as for ``open``."""

    def open(self, file: str, max_bytes: int) -> OpenFile:
        """Open a file of at most ``max_bytes`` bytes.

        ``AdapterError`` if the file is missing, unreadable, or too large; ``AdapterForbidden`` if the file lies outside
        of all places that are allowed.
        """

    def find_weights(self) -> str:
        """Return the name of the weight file, or raise ``AdapterError`` if there is none."""

    def identify(self, file: str, max_bytes: int) -> FileIdentity:
        """Return the present identity of a file of at most ``max_bytes`` bytes; errors as for ``open``."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A ``Folder`` on disk."""

    name: str  # the adapter, for messages
    path: Path
    # Real paths below which every file that is opened must lie; ``None`` for no limit.
    roots: Collection[str] | None = None

    @property
    def place(self) -> str:
        """Its path."""
        return str(self.path)

    def read(self, file: str, max_bytes: int) -> bytes:
        """Return the content of a small file; errors as for ``open_regular``."""
        with open_regular(self.name, self.path / file, max_bytes, self.roots) as opened:
            return opened.read(max_bytes)

    def open(self, file: str, max_bytes: int) -> LocalFile:
        """Open a file of at most ``max_bytes`` bytes in the folder; errors as for ``open_regular``."""
        path = self.path / file
        return LocalFile(self.name, open_regular(self.name, path, max_bytes, self.roots), path)

    def find_weights(self) -> str:
        """Return the name of the weight file, or raise ``AdapterError`` if there is none."""
        for file in WEIGHT_FILES:
            if os.path.lexists(self.path / file):
                return file
        raise AdapterError(self.name, f"has no weight file ({' or '.join(WEIGHT_FILES)})")

    def identify(self, file: str, max_bytes: int) -> FileIdentity:
        """Return the present identity of a file, without opening it: its size bounds no work here."""
        try:
            return FileIdentity.of(self.path / file, os.stat(self.path / file))
        except OSError as error:
            raise AdapterError(self.name, f"cannot open {file}: {error.strerror}") from error


def open_regular(name: str, path: Path, max_bytes: int, roots: Collection[str] | None = None) -> BinaryIO:
    """Open a regular file of at most ``max_bytes`` bytes; never blocks.

    Messages name the adapter ``name``. ``AdapterError`` if the file is missing, unreadable, not regular, or too large;
    ``AdapterForbidden`` if the file lies outside the roots.
    """
    try:
        # O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        if roots is not None and not lies_in(os.path.realpath(path), roots):  # a confined process may not open it
            raise leads_outside(name, path.name) from error
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise AdapterError(name, f"cannot open {path.name}: {why}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError(name, f"{path.name} is not a regular file")
        if roots is not None and not lies_in(_opened_path(fd, path), roots):
            raise leads_outside(name, path.name)
        if status.st_size > max_bytes:
            raise AdapterError(name, f"{path.name} has {status.st_size} bytes, at most {max_bytes} are accepted")
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def leads_outside(name: str, thing: str) -> AdapterForbidden:
    """Return the error of a path or file that lies outside the roots."""
    return AdapterForbidden(name, f"{thing} leads outside the directories adapters may be loaded from")


def lies_in(real_path: str, roots: Collection[str]) -> bool:
    """Return whether a real path is one of some real paths, or below one."""
    return any(Path(real_path).is_relative_to(root) for root in roots)


def real_roots(folders: Iterable[str], named: Iterable[str]) -> tuple[str, ...]:
    """Return the real folders in which files of adapters may lie: a link that a tenant makes leads no further.

    Args:
        folders: Folders whose adapters may be served; tenants write in them.
        named: Adapters that the operator names. Each may lie where it lies now, and so may its files: a snapshot in the
            Hugging Face cache, for one, is a folder of links to another.
    """
    roots = [os.path.realpath(folder) for folder in folders]
    for path in named:
        folder = os.path.realpath(path)
        files = (os.path.join(folder, file) for file in (CONFIG_FILE, *WEIGHT_FILES))
        roots += [folder, *(os.path.dirname(os.path.realpath(one)) for one in files)]
    return tuple(dict.fromkeys(roots))


def _opened_path(fd: int, path: Path) -> str:
    """Return the real path of an open file; where the system does not tell it, the present real path of ``path``."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return os.path.realpath(path)


def read_config(folder: Folder) -> dict[str, Any]:
    """Read the configuration in an adapter's folder; errors as for the two functions below."""
    return parse_config(folder.name, read_config_file(folder))


def read_config_file(folder: Folder) -> bytes:
    """Return the content of the configuration in an adapter's folder.

    ``AdapterError`` if the file is missing or too large.
    """
    return folder.read(CONFIG_FILE, MAX_CONFIG_BYTES)


def parse_config(name: str, content: bytes) -> dict[str, Any]:
    """Return the configuration in the content of its file.

    ``AdapterError`` if the file is malformed; names the adapter ``name``.
    """

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number")

    try:
        value = json.loads(content, parse_constant=constant, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise AdapterError(name, f"{CONFIG_FILE} is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise AdapterError(name, f"{CONFIG_FILE} holds a {type(value).__name__}, expected an object")
    return value


def unique_pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's members, for ``json.loads``; of two with one name a reader could take either.

    ``ValueError`` if a name appears twice.
    """
    unique = dict(items)
    if len(unique) != len(items):
        raise ValueError("a key appears twice")
    return unique


def shown(value: object, most: int = 80) -> str:
    """Return a stranger's value for a message, cut to ``most`` characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
