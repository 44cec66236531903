"""An adapter's folder, of which a tenant may write every file, and change it at any time.

Only regular files are opened (a FIFO would block a thread). Sizes are limited before bytes are read. Nothing is
memory-mapped: truncating a mapped file kills the process, while a short read raises an error.

Links are followed, since the Hugging Face cache consists of them. Where *roots* are given, the file that was opened is
looked at, not its path: a link that is put in place between a check and the opening leads nowhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from manylora.errors import AdapterError, AdapterForbidden, AdapterNotFound

__all__ = ["CONFIG_FILE", "WEIGHT_FILES", "AdapterFolder", "lies_in", "open_folder", "open_regular", "vouched_roots"]

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""In PEFT's order: the first that exists is read. If it is damaged, the adapter is refused."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The folder of an adapter, for its files to be opened.

    Args:
        name: The adapter, for messages.
        path: The folder.
        roots: Real paths below which every file that is opened must lie; ``None`` for no limit.
    """

    name: str
    path: Path
    roots: Collection[str] | None = None

    def open(self, file: str, max_bytes: int) -> BinaryIO:
        """Open a file of at most ``max_bytes`` bytes in the folder; errors as of ``open_regular``."""
        return open_regular(self.name, self.path / file, max_bytes, self.roots)

    def find_weights(self) -> str:
        """Return the name of the weight file, or raise ``AdapterError`` if there is none."""
        for file in WEIGHT_FILES:
            if os.path.lexists(self.path / file):
                return file
        raise AdapterError(self.name, f"has no weight file ({' or '.join(WEIGHT_FILES)})")


def open_folder(name: str, path: str | Path, roots: Collection[str] | None = None) -> AdapterFolder:
    """Return the folder at a path.

    Raises:
        AdapterNotFound: There is no folder.
        AdapterForbidden: It lies outside the roots.
    """
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


def vouched_roots(path: str) -> tuple[str, ...]:
    """Return the real folders of an adapter that the operator names: its own, and those its files lie in now.

    A snapshot in the Hugging Face cache, for one, is a folder of links to another.
    """
    folder = os.path.realpath(path)
    files = (os.path.join(folder, file) for file in (CONFIG_FILE, *WEIGHT_FILES))
    return tuple(dict.fromkeys([folder, *(os.path.dirname(os.path.realpath(one)) for one in files)]))


def _opened_path(fd: int, path: Path) -> str:
    """Return the real path of an open file; where the system does not tell it, the one that ``path`` has now."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return os.path.realpath(path)
