"""``adapter_model.bin``: adapters from before safetensors, as pickles in a zip archive.

Unpickling executes the file, so the pickle is interpreted by a machine of our own (``pickled``). A tensor is a window
on a *storage*, a member of the archive::

    archive/data.pkl     {"...lora_A.weight": rebuild(storage "0" of float32, offset, shape, strides), ...}
    archive/data/0       the numbers

Members are not compressed, so a window is a range of the file, and only that range is read, once the tensor is wanted.
Sizes are checked before: the archive's directory and its pickle are small, and a window lies in its storage, counts
with all its elements where its strides are 0, and is no small part of its range.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from typing import BinaryIO

import numpy as np

from manylora.core.adapters.pickled import NotTensorsError, StorageWindow, run_pickle
from manylora.core.adapters.tensors import FLOAT_DTYPES, StoredTensor
from manylora.core.errors import AdapterError

__all__ = ["describe_bin"]

FILE = "adapter_model.bin"
MAX_PICKLE_BYTES = 8 * 1024 * 1024
MAX_DIRECTORY_BYTES = 2 * 1024 * 1024
"""Largest directory of an archive, of which every entry becomes an object: some ten thousand tensors have it."""
MAX_SPREAD = 16
"""Longest range of a tensor, in sizes of the tensor: a tensor that is a part of a few fused tensors is read."""

MEMBER_HEADER = struct.Struct("<4s22xHH")
"""Before a member's bytes: a signature, and the lengths of the name and the extra field that follow."""


class _BoundedReads:
    """A file for ``zipfile``, of which no single read may be longer than ``most``: the directory is one read."""

    def __init__(self, file: BinaryIO, part: str, most: int) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.part, self.most = part, most
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, length: int = -1) -> bytes:
        left = max(0, self._size - self._file.tell())
        length = left if length < 0 else min(length, left)
        if length > self.most:
            raise ValueError(f"its {self.part} has more than {self.most} bytes")
        return self._file.read(length)


def describe_bin(name: str, file: BinaryIO, max_bytes: int) -> dict[str, StoredTensor]:
    """Return every tensor of a PyTorch weight file, without its bytes and without executing it.

    Messages name the adapter ``name``. The tensors together may have at most ``max_bytes`` bytes. ``AdapterError`` if
    the file is damaged, too large, compressed, older than PyTorch 1.6, or holds more than tensors.
    """
    bounded = _BoundedReads(file, "directory", MAX_DIRECTORY_BYTES)
    try:
        archive = zipfile.ZipFile(bounded)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise AdapterError(name, f"{FILE} is damaged, or was saved by a PyTorch older than 1.6: {error}") from error
    bounded.part, bounded.most = "pickle", MAX_PICKLE_BYTES
    entries = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size for one in entries):
        raise AdapterError(name, f"{FILE} is compressed, which PyTorch's own files are not")
    if sum(entry.file_size for entry in entries) > max_bytes:
        raise AdapterError(name, f"{FILE} claims to hold more than {max_bytes} bytes")
    try:
        content = _unpickle(archive, file, entries[0].filename.partition("/")[0])
    except NotTensorsError as error:
        raise AdapterError(name, f"{FILE} {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # a hostile pickle makes the machine raise nearly anything
        raise AdapterError(name, f"{FILE} is damaged: {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise AdapterError(name, f"{FILE} holds a {type(content).__name__}, expected tensors by name")
    tensors: dict[str, StoredTensor] = {}
    left = max_bytes
    for key, value in content.items():
        if not isinstance(value, StorageWindow):
            raise AdapterError(name, f"{FILE} holds more than tensors by name: {key[:80]!r}")
        left -= value.num_bytes
        if left < 0:
            raise AdapterError(name, f"{FILE} holds tensors of more than {max_bytes} bytes")
        try:
            tensors[key] = _place(value)
        except ValueError as error:
            raise AdapterError(name, f"{FILE} is damaged: {key[:80]!r} {error}") from error
    return tensors


def _unpickle(archive: zipfile.ZipFile, file: BinaryIO, prefix: str) -> object:
    """Return the object in the archive's pickle, with tensors as windows."""
    if f"{prefix}/byteorder" in archive.namelist() and archive.read(f"{prefix}/byteorder") != b"little":
        raise ValueError("its numbers are big-endian")

    def find(key: str) -> tuple[int, int]:
        member = archive.getinfo(f"{prefix}/data/{key}")
        file.seek(member.header_offset)
        signature, *lengths = MEMBER_HEADER.unpack(file.read(MEMBER_HEADER.size))
        if signature != b"PK\3\4":
            raise ValueError("a member is not where the directory says")
        begin = member.header_offset + MEMBER_HEADER.size + sum(lengths)
        return begin, begin + member.file_size

    return run_pickle(archive.read(f"{prefix}/data.pkl"), find)


def _place(window: StorageWindow) -> StoredTensor:
    """Return a window as a tensor that is still to be read; ``ValueError`` if it reaches beyond its storage."""
    dtype, shape = window.storage.dtype, window.shape
    num = math.prod(shape)
    if dtype not in FLOAT_DTYPES or num == 0:
        # An unsupported dtype is refused where the tensor's name is known, without its bytes.
        return StoredTensor(dtype, shape, np.empty(0, np.uint8))
    itemsize = FLOAT_DTYPES[dtype].itemsize
    begin, end_of_storage = window.storage.place
    begin += window.offset * itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, window.strides, strict=True))
    end = begin + span * itemsize
    if end > end_of_storage:
        raise ValueError("lies outside its storage")
    if span > MAX_SPREAD * num:
        raise ValueError(f"is spread over more than {MAX_SPREAD} times its size")
    row_major = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    is_row_major = all(a == b or size == 1 for a, b, size in zip(window.strides, row_major, shape, strict=True))
    return StoredTensor(dtype, shape, np.empty(0, np.uint8), (begin, end), None if is_row_major else window.strides)
