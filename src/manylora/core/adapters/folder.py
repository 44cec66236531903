"""An adapter's folder, of which a tenant may write every file, and change it at any time; here of folders on disk.

Only regular files are opened (a FIFO would block a thread). Sizes are limited before bytes are read. Nothing is
memory-mapped: truncating a mapped file kills the process, while a short read raises an error.

Links are followed, since the Hugging Face cache consists of them. Where *roots* are given, the file that was opened is
looked at, not its path: a link that is put in place between a check and the opening leads nowhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from manylora.core.adapters.opened import FileIdentity, LocalFile, OpenFile
from manylora.core.adapters.remote import Registry, RemoteFolder
from manylora.core.adapters.urls import NO_REGISTRY, is_url
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound

__all__ = [
    "CONFIG_FILE",
    "WEIGHT_FILES",
    "AdapterFolder",
    "Folder",
    "lies_in",
    "open_folder",
    "open_regular",
    "real_roots",
]

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""In PEFT's order: the first that exists is read. If it is damaged, the adapter is refused."""


class Folder(Protocol):
    """The folder of an adapter, for its files to be opened."""

    @property
    def name(self) -> str:
        """The adapter, for messages."""
        ...

    @property
    def place(self) -> str:
        """Its path or URL."""
        ...

    def read(self, file: str, max_bytes: int) -> bytes:
        """Return the content of a small file, of at most ``max_bytes`` bytes; errors as of ``open``."""
        ...

    def open(self, file: str, max_bytes: int) -> OpenFile:
        """Open a file of at most ``max_bytes`` bytes.

        Raises:
            AdapterError: It is missing, unreadable, or too large.
            AdapterForbidden: It lies outside of all places that are allowed.
        """
        ...

    def find_weights(self) -> str:
        """Return the name of the weight file, or raise ``AdapterError`` if there is none."""
        ...

    def identify(self, file: str, max_bytes: int) -> FileIdentity:
        """Return the present identity of a file of at most ``max_bytes`` bytes; errors as of ``open``."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A ``Folder`` on disk.

    Args:
        name: The adapter, for messages.
        path: The folder.
        roots: Real paths below which every file that is opened must lie; ``None`` for no limit.
    """

    name: str
    path: Path
    roots: Collection[str] | None = None

    @property
    def place(self) -> str:
        """Its path."""
        return str(self.path)

    def read(self, file: str, max_bytes: int) -> bytes:
        """Return the content of a small file; errors as of ``open_regular``."""
        with open_regular(self.name, self.path / file, max_bytes, self.roots) as opened:
            return opened.read(max_bytes)

    def open(self, file: str, max_bytes: int) -> LocalFile:
        """Open a file of at most ``max_bytes`` bytes in the folder; errors as of ``open_regular``."""
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


def open_folder(
    name: str, path: str | Path, roots: Collection[str] | None = None, registry: Registry | None = None
) -> Folder:
    """Return the folder at a path, or at a URL if there is a ``registry`` to ask.

    Raises:
        AdapterNotFound: There is no folder.
        AdapterForbidden: It lies outside the roots, or no registry is allowed.
    """
    if isinstance(path, str) and is_url(path):
        if registry is None:
            raise AdapterForbidden(name, NO_REGISTRY)
        return RemoteFolder(name, path.rstrip("/"), registry)
    folder = Path(path)
    try:
        is_folder = folder.is_dir()
        is_allowed = roots is None or lies_in(os.path.realpath(folder), roots)
    except (OSError, ValueError) as error:
        raise AdapterNotFound(name, "its path cannot be looked up") from error
    if not is_allowed:
        raise _outside(name, "its path")
    if not is_folder:
        raise AdapterNotFound(name, "there is no directory at its path")
    return AdapterFolder(name, folder, roots)


def open_regular(name: str, path: Path, max_bytes: int, roots: Collection[str] | None = None) -> BinaryIO:
    """Open a regular file of at most ``max_bytes`` bytes; never blocks.

    Messages name the adapter ``name``.

    Raises:
        AdapterError: The file is missing, unreadable, not regular, or too large.
        AdapterForbidden: It lies outside the roots.
    """
    try:
        # O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        if roots is not None and not lies_in(os.path.realpath(path), roots):  # a confined process may not open it
            raise _outside(name, path.name) from error
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise AdapterError(name, f"cannot open {path.name}: {why}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError(name, f"{path.name} is not a regular file")
        if roots is not None and not lies_in(_opened_path(fd, path), roots):
            raise _outside(name, path.name)
        if status.st_size > max_bytes:
            raise AdapterError(name, f"{path.name} has {status.st_size} bytes, at most {max_bytes} are accepted")
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _outside(name: str, thing: str) -> AdapterForbidden:
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
    """Return the real path of an open file; where the system does not tell it, the one that ``path`` has now."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return os.path.realpath(path)
