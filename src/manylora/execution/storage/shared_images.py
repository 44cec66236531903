"""Images of published adapters, packed by one engine of a machine and mapped by the others.

::

    engine A   locks the folder -> its reader checks and packs -> notes version, layout and descriptor N in the folder
    engine B   waits for the lock -> reads the note -> opens /proc/A/fd/N -> maps the same pages

The folder is the server's (``AdapterSpool``), and readers, which parse what clients send, cannot write there: a note is
an engine's. It names the memory file by its inode, for a number may stand for another file by now, and the file's size
is sealed. An engine that cannot map the image packs one for itself, which is the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from manylora.core.adapters.read import ReadRules
from manylora.execution.storage.host_tier import HostAdapter
from manylora.execution.storage.reader_messages import Packed

__all__ = ["PublishedFolder", "SharedImages"]

NOTE = "packed"
MOST_HELD = 64  # descriptors that an engine keeps open for the others, which map an image within a second or never


class _Note(msgspec.Struct, frozen=True, array_like=True):
    rules: str  # all that an image depends on beside the files
    packed: Packed
    process: int  # the engine that packed it, and the descriptor there
    descriptor: int
    file: tuple[int, int]  # device and inode of the image


class PublishedFolder:
    """The folder of a published adapter, locked: of several engines one packs it."""

    def __init__(self, path: Path, rules: ReadRules) -> None:
        self.offered: int | None = None  # the descriptor of the image that this engine packed
        self._note = path / NOTE
        self._rules = repr(
            (rules.base.fingerprint, rules.base.page, rules.asked_dtype, [one.share for one in rules.base.modules[:1]])
        )
        self._max_pages = math.inf if rules.max_pages is None else rules.max_pages

    def find(self) -> tuple[Packed, int] | None:
        """Return the version that another engine packed, and a descriptor of its image; ``None`` if there is none."""
        try:
            note = msgspec.msgpack.decode(self._note.read_bytes(), type=_Note)
            if note.rules != self._rules or note.packed.version.num_pages > self._max_pages:
                return None
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            descriptor = os.open(f"/proc/{note.process}/fd/{note.descriptor}", flags)
        except (OSError, msgspec.DecodeError):
            return None
        if _identity(descriptor) != note.file:
            os.close(descriptor)
            return None
        return note.packed, descriptor

    def offer(self, packed: Packed, descriptor: int) -> None:
        """Offer an image, whose size is sealed, to the other engines, as long as its descriptor is open."""
        self.offered = descriptor
        note = _Note(self._rules, packed, os.getpid(), descriptor, _identity(descriptor))
        with contextlib.suppress(OSError):  # of memory that is full: each packs for itself
            self._note.write_bytes(msgspec.msgpack.encode(note))


class SharedImages:
    """The images that one engine shares; safe from any thread.

    ``root`` is the real path of the folder of published adapters.
    """

    def __init__(self, rules: ReadRules, root: str) -> None:
        self._rules = rules
        self._root = Path(root)
        self._held: deque[weakref.finalize[[int], HostAdapter]] = deque()

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[PublishedFolder | None]:
        """Lock the folder of a published adapter, which blocks while another engine packs it; ``None`` for others.

        Only a folder directly in the root counts, with links and ``..`` resolved: elsewhere a client may write a note.
        """
        place = Path(os.path.realpath(path))
        try:
            is_published = place.parent == self._root
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if is_published else None
        except OSError:  # its reader says so
            lock = None
        if lock is None:
            yield None
            return
        folder = PublishedFolder(place, self._rules)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(lock)
            if folder.offered is not None:
                os.close(folder.offered)

    def hold(self, folder: PublishedFolder, adapter: HostAdapter) -> None:
        """Keep the image that was offered open for others as long as this engine has it."""
        if folder.offered is None:
            return
        self._held.append(weakref.finalize(adapter, os.close, folder.offered))
        folder.offered = None
        if len(self._held) > MOST_HELD:
            self._held.popleft()()


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
