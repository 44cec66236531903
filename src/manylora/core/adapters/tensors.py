"""Weights of an untrusted file: tensors as they are stored, tensors that follow from them, and what one module has.

A method whose delta is a product in other words (VeRA's shared matrices, LoHa's and LoKr's products) says how A and B
follow from the stored tensors (``FoldedTensor``). They are computed once the bytes are there, and from then on the
adapter is plain LoRA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from manylora.core.adapters.folder import shown
from manylora.core.adapters.shape import TargetModule
from manylora.core.errors import AdapterError

__all__ = [
    "FLOAT_DTYPES",
    "PREFIX",
    "FoldedTensor",
    "Located",
    "ModuleWeights",
    "Parts",
    "Place",
    "Replaced",
    "StoredModule",
    "StoredTensor",
    "Tensor",
    "VectorKind",
    "check_tensor",
    "gather_parts",
    "only_vectors",
]

PREFIX = "base_model.model."
MAX_TENSORS = 200_000

# With LoRA, or trained tokens, on the embedding or the head PEFT also stores the frozen matrix of the base.
_BASE_COPY = re.compile(r"base_model\.model\.(?P<module>.+?)(?:\.token_adapter)?\.base_layer\.weight")

_UNNAMED = (
    "which modules_to_save does not name: of a resized vocabulary, which is not served, or a copy of the base's, which "
    "save_pretrained(..., save_embedding_layers=False) leaves out"
)
_FOREIGN_KEYS = (
    ("lora_magnitude_vector", "a DoRA magnitude vector, but use_dora is not set"),
    ("modules_to_save", "a fully trained module, which modules_to_save does not name"),
    ("original_module", "a module of the base (modules_to_save), which is not expected"),
    ("trainable_tokens", "a trained token, but trainable_token_indices is not set"),
    (".lora_B.bias", "a trained bias in lora_B, but lora_bias is not set"),
    (".bias", "a trained bias, but bias is 'none'"),
    ("embed_tokens.weight", f"a full embedding matrix, {_UNNAMED}"),
    ("lm_head.weight", f"a full output head, {_UNNAMED}"),
)

FLOAT_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
}
"""Supported types of weights, by safetensors' names, and the numpy type of their bits where numpy lacks the type."""

Place: TypeAlias = tuple[int, int]  # a range of bytes in a file


def _float8_values() -> NDArray[np.float32]:
    """Return the numbers of the 256 codes of ``F8_E4M3``, which has two NaN and no infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >> 7, -values, values).astype(np.float32)


_FLOAT8 = _float8_values()


class VectorKind(StrEnum):
    """What a vector of a module's outputs does, in the formula of ``method``."""

    FACTOR = "factor"  # multiplies the sum of base and LoRA
    GAIN = "gain"  # takes the place of the weight of a norm: the factor is the ratio of the two norms' outputs
    MAGNITUDE = "magnitude"
    """Length that each row of the weight with LoRA is brought to (DoRA): the factor follows from the base's weight."""
    SHIFT = "shift"  # added behind the bias of the base
    BIAS = "bias"  # takes the place of the bias of the base: the shift is the difference of the two
    BIAS_FACTOR = "factor of the bias"  # multiplies the bias of the base: the shift is what that adds to it

    @property
    def is_factor(self) -> bool:
        """Whether it multiplies, in place of being added."""
        return self in (VectorKind.FACTOR, VectorKind.GAIN, VectorKind.MAGNITUDE)

    @property
    def needs_base(self) -> bool:
        """Whether the base's numbers are needed to make a factor or shift of it."""
        return self not in (VectorKind.FACTOR, VectorKind.SHIFT)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes with their type and shape."""

    dtype: str  # safetensors' name of the type. An unsupported one (``I8``) is refused where the tensor's name is known
    shape: tuple[int, ...]
    # Bytes, little-endian and row-major, ``[num_bytes]`` uint8; empty where only the header was read.
    data: NDArray[np.uint8]
    # Range of bytes in the file that is still to be read, ``None`` once ``data`` is there.
    place: Place | None = None
    # Distances in the range at ``place``, in elements; ``None`` if it is row-major.
    strides: tuple[int, ...] | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """The ranges that are still to be read."""
        return () if self.place is None else (self.place,)

    def filled(self, contents: Mapping[Place, NDArray[np.uint8]]) -> StoredTensor:
        """Return the tensor with its bytes, from those that were read."""
        if self.place is None:
            return self
        content = contents[self.place]
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
        elif self.dtype == "F8_E4M3":
            values = _FLOAT8[bits]
        elif self.dtype == "F8_E5M2":  # the upper half of a float16
            values = (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
        else:
            with np.errstate(over="ignore"):
                values = bits.astype(np.float32, copy=False)
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class FoldedTensor:
    """A matrix or vector that is computed from tensors of the file once these are read."""

    shape: tuple[int, ...]  # sizes of the result
    sources: tuple[StoredTensor, ...]
    # Returns the result, float32, from the numbers of the sources. Each number is a product or a sum of a few numbers,
    # so that the same file gives the same bits on every machine.
    fold: Callable[..., NDArray[np.float32]]
    dtype: str = "F32"  # a type that holds every number: the sources' where they are moved, not multiplied

    @property
    def places(self) -> tuple[Place, ...]:
        """The ranges that are still to be read."""
        return tuple(place for source in self.sources for place in source.places)

    def filled(self, contents: Mapping[Place, NDArray[np.uint8]]) -> StoredTensor:
        """Return the result, from the bytes that were read."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.fold(*(source.filled(contents).as_float32() for source in self.sources))
        assert values.shape == self.shape, f"{values.shape} != {self.shape}"
        return StoredTensor("F32", self.shape, np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8))

    @property
    def data(self) -> NDArray[np.uint8]:
        """None: bytes come with ``filled``."""
        raise AssertionError("a folded tensor is filled before its bytes are asked for")

    def as_float32(self) -> NDArray[np.float32]:
        """None: numbers come with ``filled``."""
        raise AssertionError("a folded tensor is filled before its numbers are asked for")


Tensor: TypeAlias = StoredTensor | FoldedTensor


class Replaced(StrEnum):
    """What a pair takes the place of: the base is subtracted from one half of it, where the base's weights are."""

    ROWS = "rows"
    """Some rows, in B of an embedding or A of a linear; the other half has a single one for each, at its place."""
    WEIGHT = "weight"
    """All of it: A of an embedding or B of a linear is the new weight, and the other half the identity."""


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The weights of one module, checked against the base."""

    module: TargetModule  # the base's module
    rank: int  # rank of the pair
    scale: float  # factor of ``B A``; folded into B when packed
    a: Tensor  # ``[rank, in_features]``
    b: Tensor  # ``[out_features, rank]``, without the scale
    # ``[out_features]`` each, by kind: at most one that is a factor, and one that is a shift.
    vectors: Mapping[VectorKind, Tensor] = field(default_factory=dict)
    replaces: Replaced | None = None  # the part of the base that A or B takes the place of, if it does

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """A, B, and the vectors."""
        return (self.a, self.b, *self.vectors.values())

    def filled(self, contents: Mapping[Place, NDArray[np.uint8]]) -> ModuleWeights:
        """Return the weights with the bytes that were read; matrices that follow from others are computed."""
        vectors = {kind: tensor.filled(contents) for kind, tensor in self.vectors.items()}
        return replace(self, a=self.a.filled(contents), b=self.b.filled(contents), vectors=vectors)


def only_vectors(module: TargetModule, vectors: Mapping[VectorKind, Tensor]) -> ModuleWeights:
    """Return weights of a module that has vectors alone: the pair beside them is zeros, of rank 1."""
    a, b = (
        StoredTensor("BF16", shape, np.zeros(2 * math.prod(shape), np.uint8))
        for shape in ((1, module.in_features), (module.out_features, 1))
    )
    return ModuleWeights(module, 1, 1.0, a, b, vectors)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """One adapted module of a weight file, before any base is known."""

    name: str  # as in the file
    rank: int  # rows of A in the file
    scale: float  # factor of ``B A``
    dtype: str  # stored type of A, by safetensors' name
    num_elements: int  # elements of all its tensors


Parts = dict[str, StoredTensor]  # the tensors of one module, by the names that its method has for them


@dataclass(frozen=True, slots=True)
class Located:
    """A module of the base with tensors of the file."""

    module: TargetModule
    stored_name: str  # its name in the file
    parts: Parts
    is_target: bool  # whether the settings name it as a target
    parameter: str | None = None  # name of its weight, if they name that in place of the module


def gather_parts(name: str, tensors: Mapping[str, StoredTensor], key: re.Pattern[str]) -> dict[str, Parts]:
    """Return a file's tensors by module.

    ``key`` matches the keys of the method: its group ``module`` is the module, and the last other group that matches is
    the name of the part. ``AdapterError`` if a key is unknown, a tensor is stored twice, or there are none.
    """
    if len(tensors) > MAX_TENSORS:
        raise AdapterError(name, f"its weight file holds {len(tensors)} tensors, at most {MAX_TENSORS} are accepted")
    modules: dict[str, Parts] = {}
    copies: list[str] = []
    for one in sorted(tensors):
        match = key.fullmatch(one)
        if match is None:
            copy = _BASE_COPY.fullmatch(one)
            if copy is None:
                _refuse_key(name, one)
            copies.append(copy["module"])
            continue
        part = match.lastgroup
        assert part is not None, "a form of a key names its part"
        parts = modules.setdefault(match["module"], {})
        if part in parts:
            raise AdapterError(name, f"tensor {shown(one)}: the weights of this module are stored twice")
        parts[part] = tensors[one]
    if not modules:
        raise AdapterError(name, "its weight file holds no LoRA weights")
    for module in copies:
        if module not in modules:
            raise AdapterError(name, f"module {shown(module)} has a full weight but no LoRA weights")
    return modules


def check_tensor(name: str, what: str, tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """Return a tensor that holds numbers of some shape; ``AdapterError`` if it has another type or shape."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise AdapterError(name, f"{what} holds {tensor.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
    if tensor.shape != shape:
        hint = " (it is transposed)" if len(shape) == 2 and tensor.shape == shape[::-1] else ""
        raise AdapterError(name, f"{what} has shape {list(tensor.shape)}, expected {list(shape)}{hint}")
    return tensor


def _refuse_key(name: str, key: str) -> NoReturn:
    for part, meaning in _FOREIGN_KEYS:
        if part in key:
            raise AdapterError(name, f"tensor {shown(key)} is {meaning}")
    raise AdapterError(name, f"tensor {shown(key)} is not understood")
