"""Packed images on disk: an adapter that left host memory comes back as a copy, not parsed, hashed and packed again.

::

    the host tier drops an image -> written here, at low priority        blocks of one file without a name
    its adapter is asked for     -> read into memory, its sum compared   | A | A | B | - | B | C | - ...
    no image, or a damaged one   -> the adapter's files are read, as ever

The file has no name, so nothing but this engine can open it, least of all a reader process that a tenant's file may
have taken over; and it ends with the engine. All that is in it was checked when it was packed, so no hash is needed
against others, only a sum against the disk.

A full file takes a new image in place of those that were not used for ``IDLE_S``, else it is left out: of adapters that
go round in turn, replacing would lose each just before its next use, and write all the time.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout
from manylora.core.adapters.packed import PackedAdapter, image_of, own_memory
from manylora.core.adapters.shape import PageShape
from manylora.core.isolation.system import STEP_NICENESS, yield_to_others
from manylora.core.types import AdapterKey, AdapterVersion
from manylora.execution.storage.host_tier import HostAdapter
from manylora.execution.storage.page_tensor import consecutive

__all__ = ["KeptImages"]

logger = logging.getLogger(__name__)

BLOCK_BYTES = 256 * 1024
IDLE_S = 600.0
WAITING_BYTES = 256 * 1024 * 1024  # most memory of dropped images that wait to be written, but for a single larger one
FREE_SHARE = 0.1  # of the disk, which the file leaves to others
NICENESS = STEP_NICENESS + 10  # of writes: below steps


@dataclass(slots=True, eq=False)
class _Image:
    layout: AdapterLayout
    blocks: Sequence[int]
    sum: int
    used_at: float


class KeptImages:
    """The images that one engine keeps on disk, within ``most_bytes``; safe from any thread.

    Every fault of the disk is logged and costs a read of the adapter's files, never an error. ``page`` is the engine's
    page, and ``clock`` returns seconds. ``OSError`` if no file can be made in ``folder``, or it would be in memory.
    """

    def __init__(
        self, folder: Path, most_bytes: int, page: PageShape, clock: Callable[[], float] = time.monotonic
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        if _is_in_memory(self._file.fileno()):
            self._file.close()
            raise OSError(f"{folder} is in memory")
        self._page = page
        self._clock = clock
        self._most_blocks = most_bytes // BLOCK_BYTES
        self._num_blocks = 0  # of the file
        self._free: list[int] = []
        self._kept: OrderedDict[AdapterKey, _Image] = OrderedDict()  # least recently used first
        self._waiting: dict[AdapterKey, int] = {}  # bytes of the images that are to be written
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "manylora-keep", yield_to_others, (NICENESS,))

    @classmethod
    def open(cls, cache_dir: str | None, most_bytes: int, page: PageShape) -> Self | None:
        """Return the images in a cache folder; ``None`` without one, without bytes, or if no file can be made there."""
        if cache_dir is None or most_bytes < BLOCK_BYTES:
            return None
        try:
            return cls(Path(cache_dir), most_bytes, page)
        except OSError as error:
            logger.warning("images_not_kept folder=%s error=%s", cache_dir, error)
            return None

    def keep(self, key: AdapterKey, adapter: HostAdapter) -> None:
        """Write an image that has left the host tier, beside the caller; images that the base settled are left out."""
        if adapter.layout.needs_base or not adapter.arrival.is_complete:
            return
        num_bytes = adapter.image.nbytes
        with self._lock:
            waiting = sum(self._waiting.values())
            is_here = self._used(key) is not None or key in self._waiting
            if is_here or (waiting and waiting + num_bytes > WAITING_BYTES):
                return
            self._waiting[key] = num_bytes
        with suppress(RuntimeError):  # closed
            self._writer.submit(self._write, key, adapter)

    def forget(self, key: AdapterKey) -> None:
        """Drop an image, one that is to be written too: its version will not be asked for again."""
        with self._lock:
            self._waiting.pop(key, None)
            if key in self._kept:
                self._forget(key)

    def find(self, version: AdapterVersion) -> PackedAdapter | None:
        """Return a version from its image, ``None`` without one; blocks on the disk."""
        with self._lock:
            kept = self._used(version.key)
        if kept is None or kept.layout.num_pages != version.num_pages or version.dtype not in (None, kept.layout.dtype):
            return None
        memory = own_memory(version.host_bytes)
        try:
            self._move(lambda file, part, at: os.preadv(file, [part], at), kept.blocks, memoryview(memory))
            fault = None if _sum(memory) == kept.sum else "another sum"
        except OSError as error:
            fault = str(error)
        with self._lock:
            if self._kept.get(version.key) is not kept:
                return None  # another image may have been written over it meanwhile
            if fault is None:
                return PackedAdapter(version, kept.layout, image_of(memory, kept.layout, self._page))
            self._forget(version.key)
        logger.warning("image_damaged adapter=%s error=%r", version.key, fault)
        return None

    def close(self) -> None:
        """Give the disk back; no image may be asked for any more."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def _write(self, key: AdapterKey, adapter: HostAdapter) -> None:
        image = adapter.image.view(torch.uint8).flatten().numpy()
        kept, blocks = None, []
        try:
            spare = self._spare_blocks()
            with self._lock:
                if key in self._waiting:
                    blocks = self._take(-(-len(image) // BLOCK_BYTES), spare)
            if blocks:
                self._move(os.pwrite, blocks, image.data)
                kept = _Image(adapter.layout, blocks, _sum(image), self._clock())
        except OSError as error:
            logger.warning("image_not_kept adapter=%s error=%s", key, error)
        with self._lock:
            is_wanted = self._waiting.pop(key, None) is not None
            if kept is not None and is_wanted:
                self._kept[key] = kept
            else:
                self._free += blocks

    def _move(self, move: Callable[[int, memoryview, int], int], blocks: Sequence[int], memory: memoryview) -> None:
        """Write or read blocks; ``move`` takes a descriptor, memory and a place in the file."""
        for place, first, count in consecutive(blocks):
            part = memory[place * BLOCK_BYTES : (place + count) * BLOCK_BYTES]
            at = first * BLOCK_BYTES
            while part:
                num_bytes = move(self._file.fileno(), part, at)
                if not num_bytes:
                    raise OSError("the file is cut")
                part, at = part[num_bytes:], at + num_bytes

    def _used(self, key: AdapterKey) -> _Image | None:
        """Return an image that is used now; the lock is held."""
        if (kept := self._kept.get(key)) is not None:
            kept.used_at = self._clock()
            self._kept.move_to_end(key)
        return kept

    def _spare_blocks(self) -> int:
        """Return by how many blocks the file may grow for what is left of the disk; a disk may take long to answer."""
        disk = os.fstatvfs(self._file.fileno())
        return max(0, int(disk.f_bavail - FREE_SHARE * disk.f_blocks) * disk.f_frsize // BLOCK_BYTES)

    def _take(self, num_blocks: int, spare: int) -> list[int]:
        """Return so many blocks, which are not free from now on; none if there is no room. The lock is held."""
        most = min(self._most_blocks, self._num_blocks + spare)
        if num_blocks > most:
            return []
        while len(self._free) + most - self._num_blocks < num_blocks:
            key, oldest = next(iter(self._kept.items()), (None, None))
            if key is None or oldest is None or self._clock() - oldest.used_at < IDLE_S:
                return []
            self._forget(key)
        while len(self._free) < num_blocks:
            self._free.append(self._num_blocks)
            self._num_blocks += 1
        taken, self._free = self._free[-num_blocks:], self._free[:-num_blocks]
        return sorted(taken)

    def _forget(self, key: AdapterKey) -> None:
        self._free += self._kept.pop(key).blocks


def _sum(memory: mmap.mmap | NDArray[np.uint8]) -> int:
    """Return a sum that a damaged bit or a block of zeros changes, at the speed of memory."""
    num_bytes = len(memory)
    return int(np.frombuffer(memory, np.uint64 if num_bytes % 8 == 0 else np.uint8).sum(dtype=np.uint64))


def _is_in_memory(descriptor: int) -> bool:
    """Whether a file is in a file system of memory, as far as the kernel tells."""
    device = os.fstat(descriptor).st_dev
    try:
        with open("/proc/self/mountinfo") as mounts:
            entries = [line.split() for line in mounts]
    except OSError:
        return False
    place = f"{os.major(device)}:{os.minor(device)}"
    return any(entry[2] == place and entry[entry.index("-") + 1] in ("tmpfs", "ramfs") for entry in entries)
