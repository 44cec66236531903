"""``adapter_model.bin``: adapters from before safetensors, as pickles in a zip archive.

Unpickling executes the file, so the pickle is interpreted by a machine of our own (``pickled``). A tensor is a window
on a *storage*, a member of the archive::

    archive/data.pkl     {"...lora_A.weight": rebuild(storage "0" of float32, offset, shape, strides), ...}
    archive/data/0       the numbers

Sizes are checked too. The archive's directory and its pickle are small, its members are uncompressed, a window lies in
its storage, and a tensor of stride 0 counts with all its elements before memory is allocated for it.
"""

from __future__ import annotations

import math
import os
import zipfile
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from manylora.adapters.pickled import NotTensorsError, Window, run_pickle
from manylora.adapters.tensors import FLOAT_DTYPES, StoredTensor
from manylora.errors import AdapterError

__all__ = ["read_bin"]

FILE = "adapter_model.bin"
MAX_PICKLE_BYTES = 8 * 1024 * 1024
MAX_DIRECTORY_BYTES = 2 * 1024 * 1024
"""Largest directory of an archive, of which every entry becomes an object: some ten thousand tensors have it."""


class _BoundedReads:
    """A file for ``zipfile``, of which no single read may be longer than ``most``: the directory is one read."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.most = most
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, length: int = -1) -> bytes:
        left = max(0, self._size - self._file.tell())
        length = left if length < 0 else min(length, left)
        if length > self.most:
            raise ValueError(f"its directory has more than {self.most} bytes")
        return self._file.read(length)


def read_bin(name: str, file: BinaryIO, max_bytes: int) -> dict[str, StoredTensor]:
    """Read every tensor of a PyTorch weight file without executing it; messages name the adapter ``name``.

    The tensors together may have at most ``max_bytes`` bytes.

    Raises:
        AdapterError: It is damaged, too large, compressed, older than PyTorch 1.6, or holds more than tensors.
    """
    bounded = _BoundedReads(file, MAX_DIRECTORY_BYTES)
    try:
        archive = zipfile.ZipFile(bounded)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise AdapterError(name, f"{FILE} is damaged, or was saved by a PyTorch older than 1.6: {error}") from error
    bounded.most = max_bytes
    entries = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size for one in entries):
        raise AdapterError(name, f"{FILE} is compressed, which PyTorch's own files are not")
    if sum(entry.file_size for entry in entries) > max_bytes:
        raise AdapterError(name, f"{FILE} claims to hold more than {max_bytes} bytes")
    try:
        content = _unpickle(archive, entries[0].filename.partition("/")[0])
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
        if not isinstance(value, Window):
            raise AdapterError(name, f"{FILE} holds more than tensors by name: {key[:80]!r}")
        left -= value.num_bytes
        if left < 0:
            raise AdapterError(name, f"{FILE} holds tensors of more than {max_bytes} bytes")
        try:
            tensors[key] = _store(value)
        except ValueError as error:
            raise AdapterError(name, f"{FILE} is damaged: {key[:80]!r} lies outside its storage") from error
    return tensors


def _unpickle(archive: zipfile.ZipFile, prefix: str) -> object:
    """Return the object in the archive's pickle, with tensors as windows."""
    if f"{prefix}/byteorder" in archive.namelist() and archive.read(f"{prefix}/byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    if archive.getinfo(f"{prefix}/data.pkl").file_size > MAX_PICKLE_BYTES:
        raise ValueError("its pickle is too large")
    program = archive.read(f"{prefix}/data.pkl")
    return run_pickle(program, lambda key: archive.read(f"{prefix}/data/{key}"))


def _store(window: Window) -> StoredTensor:
    """Return a window as contiguous bytes, or raise ``ValueError`` if it reaches beyond its storage."""
    dtype = window.storage.dtype
    if dtype not in FLOAT_DTYPES or math.prod(window.shape) == 0:
        # An unsupported dtype is refused where the tensor's name is known, without its bytes.
        return StoredTensor(dtype, window.shape, np.empty(0, np.uint8))
    bits = FLOAT_DTYPES[dtype]
    numbers: NDArray[Any] = np.frombuffer(window.storage.data, bits)[window.offset :]
    last = sum((size - 1) * stride for size, stride in zip(window.shape, window.strides, strict=True))
    if last >= len(numbers):
        raise ValueError("the tensor lies outside its storage")
    view = as_strided(numbers, window.shape, [stride * bits.itemsize for stride in window.strides], writeable=False)
    return StoredTensor(dtype, window.shape, np.ascontiguousarray(view).reshape(-1).view(np.uint8))
