"""Files of registries on this machine's disk, within a number of bytes; the least recently read make room.

::

    KEY   the SHA-256 of the URL        | what is here: head, ranges | the file, with holes where no range came yet |
    .used     bytes of all files                                       ^ 8 KiB

A range that is asked for is fetched once: engines and replicas share the folder, and a file is locked while its range
comes. The bytes behind it are on their way when the next range is asked for: a file is one request, and no layer costs
a round trip. A download that was killed goes on with the ranges that it lacks. A file is another one once its identity
in the registry is, and all of it is fetched again.

A file with a known SHA-256 is compared with it once it is whole: a hub tells it, and ``#sha256=DIGEST`` of a URL does.
With the latter no byte beyond the opening is handed on before.

Every fault of the disk is logged, and costs a download.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manylora.core.adapters.hash_cache import SETTLED_S
from manylora.core.adapters.remote import RemoteHead, changed_at
from manylora.core.adapters.sources import HubPlace, is_moving
from manylora.core.errors import AdapterError, AdapterUnavailable
from manylora.execution.storage.http_registry import FIRST_BYTES, HttpRegistry
from manylora.execution.storage.registry_addresses import file_of

__all__ = ["CachedRegistry", "DiskFolder"]

logger = logging.getLogger(__name__)

HEADER_BYTES = 8192
MOST_RANGES = 200  # ranges that a header remembers; further ones are fetched again
NOTED_BYTES = 8 * 1024 * 1024  # a download that is killed loses fewer
PART_BYTES = 256 * 1024
SPARED = 7 / 8  # share of the limit to which files are removed at once, so that few files in many cost a look at all

_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Kept(msgspec.Struct, array_like=True):
    """The part of a file that is here."""

    head: RemoteHead
    ranges: list[tuple[int, int]] = []  # begin and end, in order, apart
    boot: str = ""  # the machine's run during which they were written; empty once they are on the disk
    sha256: str = ""  # of the whole file, once it was asked for


class DiskFile:
    """A file of the cache, open and locked."""

    def __init__(self, descriptor: int, kept: _Kept) -> None:
        self.kept = kept
        self._descriptor = descriptor

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here."""
        return not list(self.gaps(0, self.kept.head.size))

    def gaps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that are not here."""
        for first, last in [*self.kept.ranges, (end, end)]:
            if begin < min(first, end):
                yield begin, min(first, end)
            begin = max(begin, last)

    def write(self, offset: int, part: bytes) -> None:
        """Write bytes; they count once they are noted."""
        while part:
            num = os.pwrite(self._descriptor, part, HEADER_BYTES + offset)
            offset, part = offset + num, part[num:]

    def note(self, begin: int, end: int) -> None:
        """Remember that a range is here."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.kept.ranges, (begin, end)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            elif first < last:
                merged.append((first, last))
        self.kept.ranges = merged[:MOST_RANGES]
        self.kept.boot = boot_id()
        self.save()

    def save(self) -> None:
        """Write the header, which is small enough to be there or not."""
        os.pwrite(self._descriptor, msgspec.msgpack.encode(self.kept).ljust(HEADER_BYTES, b"\0"), 0)

    def settle(self) -> None:
        """Bring a whole file to the disk: from then on it outlives a loss of power."""
        if self.kept.boot and self.is_whole:
            os.fsync(self._descriptor)
            self.kept.boot = ""
            self.save()

    def read(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield a range that is here, in parts."""
        while begin < end:
            part = os.pread(self._descriptor, min(PART_BYTES, end - begin), HEADER_BYTES + begin)
            if not part:
                raise OSError("a file of the cache is shorter than it was")
            begin += len(part)
            yield part

    def digest(self) -> str:
        """Return the SHA-256 of the whole file."""
        if not self.kept.sha256:
            digest = hashlib.sha256()
            for part in self.read(0, self.kept.head.size):
                digest.update(part)
            self.kept.sha256 = digest.hexdigest()
            self.save()
        return self.kept.sha256


class DiskFolder:
    """The folder of the cache, made when a file is first kept; other processes may use it at the same time."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    @contextmanager
    def locked(self, url: str, head: RemoteHead | None = None) -> Iterator[DiskFile | None]:
        """Open and lock the file of a URL; ``None`` if it is not here.

        With a ``head`` the file is made, or emptied if it had another one; ``None`` if there is no room. ``OSError`` if
        the folder cannot be used.
        """
        descriptor = self._lock(hashlib.sha256(url.encode()).hexdigest(), is_made=head is not None)
        if descriptor is None:
            yield None
            return
        try:
            kept = _kept_in(descriptor)
            if head is not None and (kept is None or kept.head != msgspec.structs.replace(head, first=b"")):
                kept = self._begin(descriptor, msgspec.structs.replace(head, first=b""))
            if kept is not None:
                os.utime(descriptor)
            elif head is not None and not os.fstat(descriptor).st_size:
                self.remove(url)  # it was made here, and there is no room
            yield None if kept is None else DiskFile(descriptor, kept)
        finally:
            os.close(descriptor)

    def remove(self, url: str) -> None:
        """Remove the file of a URL."""
        (self._path / hashlib.sha256(url.encode()).hexdigest()).unlink(missing_ok=True)

    def _lock(self, name: str, *, is_made: bool) -> int | None:
        path = f"{self._path}/{name}"
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if is_made else 0)
        while True:
            try:
                descriptor = os.open(path, flags, 0o600)
            except FileNotFoundError:
                if not is_made:
                    return None
                self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
            except FileNotFoundError:
                pass
            os.close(descriptor)  # it was removed before it was locked

    def _begin(self, descriptor: int, head: RemoteHead) -> _Kept | None:
        before, size = os.fstat(descriptor).st_size, HEADER_BYTES + head.size
        if not self._take(size - before):  # which may count all files, this one as it was
            return None
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, size)
        kept = _Kept(head)
        DiskFile(descriptor, kept).save()
        return kept

    def _take(self, num_bytes: int) -> bool:
        """Count bytes in, after files were removed to make room; return whether there is room."""
        counter = os.open(f"{self._path}/.used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(counter, fcntl.LOCK_EX)
            text = os.pread(counter, 20, 0)
            used = int(text) + num_bytes if text.isdigit() else self._max_bytes + 1
            if used > self._max_bytes:
                most = min(int(SPARED * self._max_bytes), self._max_bytes - num_bytes)
                used = self._shrink(most) + num_bytes if most >= 0 else used
            if used <= self._max_bytes:
                os.pwrite(counter, b"%020d" % max(0, used), 0)
            return used <= self._max_bytes
        finally:
            os.close(counter)

    def _shrink(self, most_bytes: int) -> int:
        """Remove the least recently read files that are not in use until few bytes are left; return how many."""
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if _SHA256.fullmatch(entry.name):
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if left <= most_bytes:
                break
            with suppress(BlockingIOError, FileNotFoundError):  # it is in use, or gone
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(descriptor)
                left -= size
        return left


@dataclass
class _Coming:
    """Bytes on their way."""

    of: tuple[str, str, RemoteHead]  # adapter, URL and head of the file
    parts: Generator[bytes, None, None]
    at: int  # place of the next part in the file
    end: int  # one past the last byte


class CachedRegistry:
    """Asks registries for what is not here yet, offline for nothing; a ``Registry``.

    ``parts`` is for one thread alone. The cache's folder keeps at most ``max_bytes``; ``None`` for none.
    """

    def __init__(
        self, asked: HttpRegistry, folder: str | None = None, max_bytes: int = 0, *, is_offline: bool = False
    ) -> None:
        self._asked = asked
        self._disk = None if folder is None or max_bytes <= 0 else DiskFolder(Path(folder), max_bytes)
        self._is_offline = is_offline
        self._coming: _Coming | None = None
        self._lock = threading.Lock()

    def pin(self, name: str, url: str) -> str:
        """Return a folder of a hub in its present commit, offline in the last one; see ``Registry.pin``."""
        url = self._asked.allow(name, url)
        place = HubPlace.of(url)
        if place is None:
            return url
        if self._is_offline:
            if (head := self._known(url)) is None:
                raise _offline(name, url)
            return place.at(head.etag)
        with self._lock:
            pinned = self._free().pin(name, url)
            commit = HubPlace.of(pinned)
            assert commit is not None
            self._keep(url, RemoteHead(0, commit.revision, ""))
        return pinned

    def open(self, name: str, url: str, max_bytes: int) -> RemoteHead:
        """Return the head of a file; see ``Registry.open``."""
        with self._lock:
            return self._open(name, url, max_bytes)

    def _open(self, name: str, url: str, max_bytes: int) -> RemoteHead:
        url, digest = self._checked(name, url)
        is_fixed = HubPlace.of(url) is not None and not is_moving(url)
        head = self._known(url) if is_fixed or self._is_offline else None
        if head is None:
            if self._is_offline:
                raise _offline(name, url)
            head = self._free().open(name, url, max_bytes)
            self._keep(url, head)
        if head.size > max_bytes:
            raise AdapterError(name, f"{file_of(url)} has {head.size} bytes, at most {max_bytes} are accepted")
        if len(head.first) == head.size:
            _compare(name, url, hashlib.sha256(head.first).hexdigest(), digest, head)
        return head

    def read(self, name: str, url: str, head: RemoteHead, offset: int, length: int) -> bytes:
        """Return a range of a file; see ``Registry.read``."""
        with self._lock:
            return b"".join(self.parts(name, url, head, offset, length))

    def parts(self, name: str, url: str, head: RemoteHead, offset: int, length: int) -> Iterator[bytes]:
        """Yield a range of a file; raises the errors of ``Registry.read``."""
        url, digest = self._checked(name, url)
        end = offset + length
        if self._disk is not None and (digest or _is_settled(head)):
            with _logged(), self._disk.locked(url, head) as file:
                if file is not None:
                    self._fill(name, url, file, *((0, head.size) if digest else (offset, end)))
                    if file.is_whole:
                        self._compare_whole(name, url, file, digest)
                    for part in file.read(offset, end):
                        offset += len(part)
                        yield part
                    file.settle()
                    return
        if digest:
            raise AdapterUnavailable(name, f"{file_of(url)} cannot be compared with its checksum: no room in the cache")
        yield from self._free().parts(name, url, head, offset, end - offset)

    def _checked(self, name: str, url: str) -> tuple[str, str]:
        """Return a URL that is allowed, and the checksum that it demands."""
        url, _, digest = self._asked.allow(name, url).partition("#sha256=")
        if digest and self._disk is None:
            raise AdapterError(name, "a checksum is compared in a cache: give --cache-dir, and --lora-cache above 0")
        return url, digest

    def _known(self, url: str) -> RemoteHead | None:
        """Return the head of a file, if that and the first bytes are here."""
        if self._disk is None:
            return None
        with _logged(), self._disk.locked(url) as file:
            if file is None:
                return None
            num_first = min(file.kept.head.size, FIRST_BYTES)
            if not list(file.gaps(0, num_first)):
                return msgspec.structs.replace(file.kept.head, first=b"".join(file.read(0, num_first)))
        return None

    def _keep(self, url: str, head: RemoteHead) -> None:
        """Keep what came with an opening."""
        if self._disk is None or not _is_settled(head):
            return
        with _logged(), self._disk.locked(url, head) as file:
            if file is not None and list(file.gaps(0, len(head.first))):
                file.write(0, head.first)
                file.note(0, len(head.first))

    def _fill(self, name: str, url: str, file: DiskFile, begin: int, end: int) -> None:
        """Fetch the parts of a range that are not here."""
        for first, last in list(file.gaps(begin, end)):
            if self._is_offline:
                raise _offline(name, url)
            coming = self._coming_to(name, url, file, first)
            noted = coming.at
            try:
                while coming.at < last:
                    part = next(coming.parts)
                    file.write(coming.at, part)
                    coming.at += len(part)
                    if coming.at - noted >= NOTED_BYTES:
                        file.note(noted, coming.at)
                        noted = coming.at
            except BaseException:
                self._free()
                raise
            finally:
                if coming.at > noted:
                    file.note(noted, coming.at)

    def _coming_to(self, name: str, url: str, file: DiskFile, first: int) -> _Coming:
        """Return the bytes on their way to a place that is not here; all before it are not here either."""
        coming, head = self._coming, file.kept.head
        if coming is not None and coming.of == (name, url, head) and coming.at <= first:
            begin, end = next(file.gaps(coming.at, head.size))  # it may be longer: other ranges may have made room
            if begin == coming.at and first < end <= coming.end:
                self._asked.extend()
                return coming
        _, last = next(file.gaps(first, head.size))
        parts = self._free().parts(name, url, head, first, last - first)
        self._coming = _Coming((name, url, head), parts, first, last)
        return self._coming

    def _free(self) -> HttpRegistry:
        """Return the registry, with no bytes on their way from it."""
        if self._coming is not None:
            self._coming.parts.close()
            self._coming = None
        return self._asked

    def _compare_whole(self, name: str, url: str, file: DiskFile, digest: str) -> None:
        """Compare a whole file with the checksums that are known; another one is removed."""
        if digest or _digest_of_hub(url, file.kept.head):
            try:
                _compare(name, url, file.digest(), digest, file.kept.head)
            except AdapterError:
                assert self._disk is not None
                self._disk.remove(url)
                raise


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("registry_cache_failed error=%r", error.strerror or error)


def _is_settled(head: RemoteHead) -> bool:
    """Whether a file that is written from now on has another head, where times tell files apart, which are seconds."""
    return not head.modified or changed_at(head) < time.time() - SETTLED_S


def _compare(name: str, url: str, found: str, digest: str, head: RemoteHead) -> None:
    for expected in filter(None, (digest, _digest_of_hub(url, head))):
        if found != expected:
            raise AdapterError(name, f"{file_of(url)} has the SHA-256 {found}, expected {expected}")


def _digest_of_hub(url: str, head: RemoteHead) -> str:
    """Return the SHA-256 that a hub has told of a large file; empty for other files."""
    etag = head.etag.strip('"')
    return etag if url.startswith("hf://") and _SHA256.fullmatch(etag) else ""


def _kept_in(descriptor: int) -> _Kept | None:
    """Return what is here of an open file; ``None`` for an empty or damaged one."""
    header = os.pread(descriptor, HEADER_BYTES, 0).rstrip(b"\0")
    try:
        kept = msgspec.msgpack.decode(header, type=_Kept)
    except msgspec.MsgspecError:
        return None
    if os.fstat(descriptor).st_size != HEADER_BYTES + kept.head.size:
        return None  # it was cut off, and would read as zeros once a later range is written
    if kept.boot not in ("", boot_id()):
        kept.ranges, kept.sha256 = [], ""  # the machine went down: they may never have reached the disk
    return kept


def boot_id() -> str:
    """Return a name of the machine's present run; empty where the system tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _offline(name: str, url: str) -> AdapterUnavailable:
    return AdapterUnavailable(
        name, f"{file_of(url)} is not in the cache, and registries are not asked (--lora-offline)"
    )
