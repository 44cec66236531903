"""Weights of an untrusted file as they are stored: tensors, and the pairs of tensors that one module has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from manylora.core.adapters.shape import TargetModule

__all__ = ["FLOAT_DTYPES", "ModuleWeights", "StoredModule", "StoredTensor"]

FLOAT_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""Supported types of weights, by safetensors' names, and the numpy type of their bits (numpy has no bfloat16)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes with their type and shape."""

    dtype: str  # safetensors' name of the type. An unsupported one (``I8``) is refused where the tensor's name is known
    shape: tuple[int, ...]
    # Bytes, little-endian and row-major, ``[num_bytes]`` uint8; empty where only the header was read.
    data: NDArray[np.uint8]
    # Range of bytes in the file that is still to be read, ``None`` once ``data`` is there.
    place: tuple[int, int] | None = None
    # Distances in the range at ``place``, in elements; ``None`` if it is row-major.
    strides: tuple[int, ...] | None = None

    def filled(self, content: NDArray[np.uint8]) -> StoredTensor:
        """Return the tensor with its bytes, from those at ``place``."""
        if self.strides is not None:
            numbers = content.view(FLOAT_DTYPES[self.dtype])
            steps = [stride * numbers.itemsize for stride in self.strides]
            view = as_strided(numbers, self.shape, steps, writeable=False)
            content = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
        return StoredTensor(self.dtype, self.shape, content)

    def as_float32(self) -> NDArray[np.float32]:
        """Return float32 values of ``shape``, a view if stored so. Float64 beyond its range becomes infinite."""
        bits = self.data.view(FLOAT_DTYPES[self.dtype])
        if self.dtype == "BF16":
            values = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            with np.errstate(over="ignore"):
                values = bits.astype(np.float32, copy=False)
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The weights of one module, checked against the base."""

    module: TargetModule  # the base's module
    rank: int  # rank of the pair
    scale: float  # factor of ``B A``; folded into B when packed
    a: StoredTensor  # ``[rank, in_features]``
    b: StoredTensor  # ``[out_features, rank]``, without the scale
    # ``[out_features]``, multiplies the output of base and LoRA together; ``None`` for no factor.
    column_scale: StoredTensor | None = None

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """A, B, and the column scale if there is one."""
        return (self.a, self.b) if self.column_scale is None else (self.a, self.b, self.column_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """One adapted module of a weight file, before any base is known."""

    name: str  # as in the file
    rank: int  # rows of A in the file
    scale: float  # factor of ``B A``
    dtype: str  # stored type of A, by safetensors' name
    num_elements: int  # elements of all its tensors
