"""Tensors as a weight file holds them, read without trusting it.

An adapter is something a stranger uploads. So: only regular files are opened (a FIFO would block a thread, a
device might do worse), sizes are limited before bytes are read, and nothing is memory-mapped: a file that is
cut short while mapped kills the process, while a short read is an error with a name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from manylora.errors import AdapterError

__all__ = ["FLOAT_DTYPES", "StoredTensor", "open_regular", "read_safetensors"]

FLOAT_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""Types of weights we read, by safetensors' names, and the numpy type of their bits (numpy knows no bfloat16)."""

MAX_HEADER_BYTES = 8 * 1024 * 1024
"""Largest safetensors header: thousands of times what a real adapter needs, small enough to parse at once."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes with their meaning.

    Args:
        dtype: safetensors' name of the type; may be one we do not read (``I8``), which is refused where the
            tensor's name is known.
        shape: Sizes.
        data: Its bytes, little-endian and row-major, ``[num_bytes]`` uint8.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def as_float32(self) -> NDArray[np.float32]:
        """Convert to float32; a float64 beyond its range becomes infinite, which the caller refuses.

        Returns:
            Array of ``shape``; a view where the bytes already are float32.
        """
        bits = self.data.view(FLOAT_DTYPES[self.dtype])
        if self.dtype == "BF16":
            values = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            with np.errstate(over="ignore"):
                values = bits.astype(np.float32, copy=False)
        return values.reshape(self.shape)


def open_regular(name: str, path: Path, max_bytes: int) -> BinaryIO:
    """Open a regular file of a limited size; never blocks on what only looks like one.

    Args:
        name: The adapter, for messages.
        path: The file; a symbolic link is followed (where links may lead is ``sources``' question).
        max_bytes: Largest size.

    Raises:
        AdapterError: It is missing, unreadable, not a regular file, or too large.
    """
    try:
        # O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise AdapterError(name, f"cannot open {path.name}: {why}") from error
    file = os.fdopen(fd, "rb", closefd=True) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    if file is None:
        os.close(fd)
        raise AdapterError(name, f"{path.name} is not a regular file")
    size = os.fstat(fd).st_size
    if size > max_bytes:
        file.close()
        raise AdapterError(name, f"{path.name} has {size} bytes, at most {max_bytes} are accepted")
    return file


def read_safetensors(name: str, path: Path, max_bytes: int) -> dict[str, StoredTensor]:
    """Read every tensor of a safetensors file.

    The library checks the format: header length, JSON, offsets that overlap, leave holes or overrun the file.

    Args:
        name: The adapter, for messages.
        path: The file.
        max_bytes: Most bytes the file may have.

    Raises:
        AdapterError: It is no such file, is damaged, or is too large.
    """
    with open_regular(name, path, max_bytes) as file:
        content = file.read(os.fstat(file.fileno()).st_size)
    if int.from_bytes(content[:8], "little") > max(MAX_HEADER_BYTES, len(content)):
        raise AdapterError(name, f"{path.name} is damaged: its header claims to be longer than the file")
    if int.from_bytes(content[:8], "little") > MAX_HEADER_BYTES:
        raise AdapterError(name, f"{path.name} has a header of more than {MAX_HEADER_BYTES} bytes")
    try:
        tensors = deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AdapterError(name, f"{path.name} is damaged or is no safetensors file: {error}") from error
    return {
        key: StoredTensor(tensor["dtype"], tuple(tensor["shape"]), np.frombuffer(tensor["data"], np.uint8))
        for key, tensor in tensors
    }
