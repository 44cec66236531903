"""``adapter_model.bin``: adapters from before safetensors, as pickles in a zip archive.

Unpickling executes the file, so only the opcodes that PyTorch writes and the functions that rebuild tensors are
allowed. A tensor is a window on a *storage*, a member of the archive::

    archive/data.pkl     {"...lora_A.weight": rebuild(storage "0" of float32, offset, shape, strides), ...}
    archive/data/0       the numbers

Sizes are checked too. Archives must be uncompressed, a window must lie in its storage, and a tensor of stride 0 counts
with all its elements before memory is allocated for it.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from manylora.adapters.tensors import FLOAT_DTYPES, StoredTensor, open_regular
from manylora.errors import AdapterError

__all__ = ["read_bin"]

MAX_PICKLE_BYTES = 64 * 1024 * 1024
MAX_MEMO = 1 << 22
"""Largest index into the unpickler's memo, which is as long as its largest index."""

_OPCODES = frozenset(
    {"PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NONE", "NEWTRUE", "NEWFALSE"}
    | {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"}
    | {"TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT"}
    | {"BINGET", "LONG_BINGET", "SHORT_BINSTRING", "BINSTRING"}
)
"""Opcodes of pickle protocol 2, which PyTorch writes."""

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    # Unsupported; refused where the tensor's name is known.
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
}


class _NotTensorsError(Exception):
    """The pickle names an object that is no part of a tensor."""


# Tuples, because a pickle can change the state of most other objects that it creates.
class _Storage(NamedTuple):
    dtype: str
    data: bytes


class _Window(NamedTuple):
    """A tensor as the pickle describes it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        bits = FLOAT_DTYPES.get(self.storage.dtype)
        return math.prod(self.shape) * (bits.itemsize if bits is not None else 1)


def read_bin(name: str, path: Path, max_bytes: int) -> dict[str, StoredTensor]:
    """Read every tensor of a PyTorch weight file without executing it.

    The file, and its tensors together, may have at most ``max_bytes`` bytes.

    Raises:
        AdapterError: It is damaged, too large, compressed, older than PyTorch 1.6, or holds more than tensors.
    """
    with open_regular(name, path, max_bytes) as file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise AdapterError(
                name, f"{path.name} is damaged, or was saved by a PyTorch older than 1.6: {error}"
            ) from error
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise AdapterError(name, f"{path.name} is compressed, which PyTorch's own files are not")
        if sum(entry.file_size for entry in entries) > max_bytes:
            raise AdapterError(name, f"{path.name} claims to hold more than {max_bytes} bytes")
        try:
            content = _unpickle(archive, entries[0].filename.partition("/")[0])
        except _NotTensorsError as error:
            raise AdapterError(name, f"{path.name} holds more than tensors, and is not executed") from error
        except Exception as error:  # a hostile pickle makes the unpickler raise nearly anything
            raise AdapterError(name, f"{path.name} is damaged: {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise AdapterError(name, f"{path.name} holds a {type(content).__name__}, expected tensors by name")
    tensors: dict[str, StoredTensor] = {}
    left = max_bytes
    for key, value in dict.items(content):  # the pickle may have overridden ``content.items``
        if not (isinstance(key, str) and isinstance(value, _Window)):
            shown = repr(key[:80]) if isinstance(key, str) else f"a {type(key).__name__}"
            raise AdapterError(name, f"{path.name} holds more than tensors by name: {shown}")
        left -= value.num_bytes
        if left < 0:
            raise AdapterError(name, f"{path.name} holds tensors of more than {max_bytes} bytes")
        try:
            tensors[key] = _store(value)
        except ValueError as error:
            raise AdapterError(name, f"{path.name} is damaged: {key[:80]!r} lies outside its storage") from error
    return tensors


def _unpickle(archive: zipfile.ZipFile, prefix: str) -> object:
    """Return the object in the archive's pickle, with tensors as windows."""
    from pickletools import genops  # few adapters are of this kind

    if f"{prefix}/byteorder" in archive.namelist() and archive.read(f"{prefix}/byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    if archive.getinfo(f"{prefix}/data.pkl").file_size > MAX_PICKLE_BYTES:
        raise ValueError("its pickle is too large")
    program = archive.read(f"{prefix}/data.pkl")
    for opcode, argument, _ in genops(program):
        if opcode.name not in _OPCODES:
            raise _NotTensorsError(opcode.name)
        if opcode.name == "LONG_BINPUT" and isinstance(argument, int) and argument > MAX_MEMO:
            raise ValueError("its memo is too large")
    return _Unpickler(io.BytesIO(program), lambda key: archive.read(f"{prefix}/data/{key}")).load()


class _Unpickler(pickle.Unpickler):
    """Unpickles a program of allowed opcodes into windows on storages; ``read_storage`` returns a storage's bytes."""

    def __init__(self, program: io.BytesIO, read_storage: Callable[[str], bytes]) -> None:
        super().__init__(program)
        self._read = read_storage
        self._storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an object that is part of a tensor, by its global name."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if (found := _FUNCTIONS.get((module, name))) is not None:
            return _Allowed(found)
        raise _NotTensorsError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage that ``('storage', type, key, place, number of elements)`` names."""
        kind, dtype, key = pid[:3]
        if kind != "storage" or dtype not in _STORAGES.values() or not isinstance(key, str):
            raise ValueError("it refers to an object that is no storage")
        if key not in self._storages:
            self._storages[key] = _Storage(dtype, self._read(key))
        if self._storages[key].dtype != dtype:
            raise ValueError("a storage has two types")
        return self._storages[key]


class _Allowed:
    """A function that a pickle may call but cannot modify."""

    __slots__ = ("_function",)
    _function: Callable[..., object]

    def __init__(self, function: Callable[..., object]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: object) -> object:
        return self._function(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(name)


def _window(storage: object, offset: object, shape: Any, strides: Any, *_: object) -> _Window:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("a tensor is malformed")
    if not (isinstance(offset, int) and len(shape) == len(strides) <= 8):
        raise ValueError("a tensor is malformed")
    return _Window(storage, offset, tuple(shape), tuple(strides))


def _other(*_: object) -> None:
    """Replace a tensor that is not plain, which is refused where its name is known."""


_FUNCTIONS: Mapping[tuple[str, str], Callable[..., object]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _window,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._utils", "_rebuild_sparse_tensor"): _other,
    ("torch.serialization", "_get_layout"): _other,
    ("torch", "Size"): _other,
}


def _store(window: _Window) -> StoredTensor:
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
