"""Memory that is written once and then mapped by any number of processes.

::

    writer = MemoryWriter()        an anonymous file in memory
    writer.append(bytes) ...       written through the file, never through a mapping
    memory = writer.seal()         from here on the operating system refuses every write
    memory.map()                   here, or in a process that received ``memory.fd``

A mapping is *copy on write*. Torch has no read-only tensors, so a stray write to a read-only mapping would end the
process; here it changes a private copy of one page, which no other process sees. ``is_strict`` maps read-only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import warnings
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "MemoryWriter", "SealedMemory"]

MADV_POPULATE_READ = 22  # since Linux 5.14

ALIGNMENT = 64  # bytes; a cache line, and the alignment of the kernels' vector loads


class SealedMemory:
    """Memory that can no longer change; its file ``fd`` is closed with this object, mappings stay valid."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        weakref.finalize(self, os.close, fd)

    def map(self, *, is_strict: bool = False, is_read: bool = False) -> torch.Tensor:
        """Return the memory as ``[num_bytes]``, uint8, mapped while any tensor over it is alive.

        ``is_read`` reads all of it now, where the system can: else the first step would, a page at a time.
        """
        access = mmap.ACCESS_READ if is_strict else mmap.ACCESS_COPY
        mapping = mmap.mmap(self.fd, self.num_bytes, access=access)
        if is_read:
            with contextlib.suppress(OSError):
                mapping.madvise(MADV_POPULATE_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(mapping, dtype=torch.uint8)


class MemoryWriter:
    """Memory that grows as it is written."""

    def __init__(self) -> None:
        self._fd = _anonymous_file()
        self._num_bytes = 0
        self._close = weakref.finalize(self, os.close, self._fd)

    def append(self, content: NDArray[np.uint8]) -> int:
        """Append ``content``; return its offset, a multiple of ``ALIGNMENT``."""
        offset = -(-self._num_bytes // ALIGNMENT) * ALIGNMENT
        rest = content.data
        position = offset
        while rest:
            written = os.pwrite(self._fd, rest, position)
            rest, position = rest[written:], position + written
        self._num_bytes = position
        return offset

    def seal(self) -> SealedMemory:
        """Return the memory, read-only from now on in every process."""
        num_bytes = max(ALIGNMENT, self._num_bytes)
        os.ftruncate(self._fd, num_bytes)
        _seal(self._fd)
        self._close.detach()
        return SealedMemory(self._fd, num_bytes)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("manylora-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:  # other systems lack files in memory: use one on disk
        return os.dup(file.fileno())


def _seal(fd: int) -> None:
    if not hasattr(os, "memfd_create"):
        return
    import fcntl

    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
