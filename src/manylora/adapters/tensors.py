"""Tensors of an untrusted weight file.

Only regular files are opened (a FIFO would block a thread). Sizes are limited before bytes are read. Nothing is
memory-mapped: truncating a mapped file kills the process, while a short read raises an error.
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

__all__ = ["FLOAT_DTYPES", "MAX_HEADER_BYTES", "StoredTensor", "open_regular", "read_safetensors"]

FLOAT_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""Supported types of weights, by safetensors' names, and the numpy type of their bits (numpy has no bfloat16)."""

MAX_HEADER_BYTES = 8 * 1024 * 1024
"""Largest safetensors header: thousands of times that of a real adapter, small enough to parse at once."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes with their type and shape.

    Args:
        dtype: safetensors' name of the type. An unsupported one (``I8``) is refused where the tensor's name is known.
        shape: Sizes.
        data: Bytes, little-endian and row-major, ``[num_bytes]`` uint8; empty where only the header was read.
        place: Range of bytes in the file that is still to be read, ``None`` once ``data`` is there.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    place: tuple[int, int] | None = None

    def as_float32(self) -> NDArray[np.float32]:
        """Return float32 values of ``shape``, a view if stored so. Float64 beyond its range becomes infinite."""
        bits = self.data.view(FLOAT_DTYPES[self.dtype])
        if self.dtype == "BF16":
            values = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            with np.errstate(over="ignore"):
                values = bits.astype(np.float32, copy=False)
        return values.reshape(self.shape)


def open_regular(name: str, path: Path, max_bytes: int) -> BinaryIO:
    """Open a regular file of at most ``max_bytes`` bytes; never blocks.

    Symbolic links are followed; ``sources`` checks their destinations. Messages name the adapter ``name``.

    Raises:
        AdapterError: The file is missing, unreadable, not regular, or too large.
    """
    try:
        # O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise AdapterError(name, f"cannot open {path.name}: {why}") from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes:
        return os.fdopen(fd, "rb")
    os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise AdapterError(name, f"{path.name} is not a regular file")
    raise AdapterError(name, f"{path.name} has {status.st_size} bytes, at most {max_bytes} are accepted")


def read_safetensors(name: str, path: Path, max_bytes: int) -> dict[str, StoredTensor]:
    """Read every tensor of a safetensors file of at most ``max_bytes`` bytes.

    The library checks the header length, the JSON, and offsets that overlap, leave holes or overrun the file.

    Raises:
        AdapterError: The file is of another kind, damaged, or too large.
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
