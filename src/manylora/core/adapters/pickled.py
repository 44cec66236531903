"""A pickle of tensors by name, interpreted without ``pickle``: nothing in it is executed.

The machine below knows the opcodes of protocol 2 that PyTorch writes. Each costs the same whatever its arguments are:
objects are referred to, never copied, and the only calls are to the functions of one table, with at most eight
arguments. So the length of a program bounds its time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pickletools import genops
from typing import Any, NamedTuple

from manylora.core.adapters.tensors import FLOAT_DTYPES

__all__ = ["NotTensorsError", "Storage", "StorageWindow", "run_pickle"]

MAX_OPCODES = 500_000  # about thirty for a tensor: ten times the opcodes of a large adapter
MAX_ARGUMENTS = 8
MAX_DIMENSIONS = 8

STORAGES: Mapping[str, str] = {
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
"""Types of numbers by the names of PyTorch's storages."""


class NotTensorsError(Exception):
    """The pickle holds an object that is no part of tensors by name; says which."""


class Storage(NamedTuple):
    """A storage: its type, and the range of bytes in the file that has its numbers."""

    dtype: str
    place: tuple[int, int]


class StorageWindow(NamedTuple):
    """A tensor as the pickle describes it: a window on a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        bits = FLOAT_DTYPES.get(self.storage.dtype)
        return math.prod(self.shape) * (bits.itemsize if bits is not None else 1)


class _Function(NamedTuple):
    """A global that a pickle may call."""

    call: Callable[..., object]


_EXECUTES = "holds more than tensors, and is not executed"


def run_pickle(program: bytes, find_storage: Callable[[str], tuple[int, int]]) -> object:
    """Return the object that a pickle describes, with tensors as windows.

    Args:
        program: The pickle.
        find_storage: Returns the place of a storage by its key; called once for each.

    Raises:
        NotTensorsError: The pickle holds more than tensors by name.
        Exception: The pickle is damaged.
    """
    machine = _Machine(find_storage)
    for number, (opcode, argument, _) in enumerate(genops(program)):
        if number >= MAX_OPCODES:
            raise ValueError(f"it has more than {MAX_OPCODES} opcodes")
        if opcode.name == "STOP":
            break
        machine.act(opcode.name, argument)
    (result,) = machine.stack
    return result


class _Machine:
    """A stack, marks on it, and a memo; it knows the opcodes of protocol 2 that PyTorch writes."""

    def __init__(self, find_storage: Callable[[str], tuple[int, int]]) -> None:
        self.stack: list[Any] = []
        self._find = find_storage
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self._storages: dict[str, Storage] = {}

    def act(self, opcode: str, argument: Any) -> None:
        push = self.stack.append
        match opcode:  # the most frequent ones first
            case "BINPUT" | "LONG_BINPUT":
                if argument > MAX_OPCODES:
                    raise ValueError("its memo is too large")
                self._memo[argument] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                push(self._memo[argument])
            case "BININT1" | "BININT" | "BININT2" | "LONG1" | "BINFLOAT":
                push(argument)
            case "BINUNICODE" | "SHORT_BINSTRING" | "BINSTRING":
                push(argument)
            case "MARK":
                self._marks.append(len(self.stack))
            case "TUPLE":
                push(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(tuple(self._pop(int(opcode[-1]))))
            case "NEWTRUE" | "NEWFALSE" | "NONE" | "EMPTY_TUPLE":
                push({"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}[opcode])
            case "BINPERSID":
                push(self._storage(self.stack.pop()))
            case "GLOBAL":
                push(_global(argument))
            case "REDUCE":
                function, given = self._pop(2)
                if type(function) is not _Function or type(given) is not tuple or len(given) > MAX_ARGUMENTS:
                    raise NotTensorsError(_EXECUTES)
                push(function.call(*given))
            case "SETITEMS" | "SETITEM":
                self._set_items(self._pop_to_mark() if opcode == "SETITEMS" else self._pop(2))
            case "EMPTY_DICT":
                push({})
            case "EMPTY_LIST":
                push([])
            case "APPENDS" | "APPEND":
                values = self._pop_to_mark() if opcode == "APPENDS" else self._pop(1)
                if type(self.stack[-1]) is not list:
                    raise ValueError("it appends to an object that is no list")
                self.stack[-1] += values
            case "BUILD":  # the state of a dictionary, where PyTorch keeps versions of modules
                self.stack.pop()
                if type(self.stack[-1]) is not dict:
                    raise ValueError("it sets the state of an object that has none")
            case "PROTO":
                pass
            case _:
                raise NotTensorsError(_EXECUTES)

    def _pop(self, num: int) -> list[Any]:
        values = self.stack[-num:]
        if len(values) != num:
            raise ValueError("the stack is too short")
        del self.stack[-num:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        first = self._marks.pop()
        if first > len(self.stack):
            raise ValueError("a mark lies above the stack")
        values = self.stack[first:]
        del self.stack[first:]
        return values

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError("it sets items of an object that has none")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                raise NotTensorsError(f"holds more than tensors by name: a {type(key).__name__}")
            target[key] = value

    def _storage(self, named: Any) -> Storage:
        """Return the storage that ``('storage', type, key, place, number of elements)`` names."""
        kind, dtype, key = named[:3]
        if kind != "storage" or dtype not in STORAGES.values() or type(key) is not str:
            raise ValueError("it refers to an object that is no storage")
        if key not in self._storages:
            self._storages[key] = Storage(dtype, self._find(key))
        if self._storages[key].dtype != dtype:
            raise ValueError("a storage has two types")
        return self._storages[key]


def _global(name: str) -> str | _Function:
    module, _, attribute = name.partition(" ")
    if module in ("torch", "torch.storage") and attribute in STORAGES:
        return STORAGES[attribute]
    if (function := _FUNCTIONS.get((module, attribute))) is None:
        raise NotTensorsError(_EXECUTES)
    return _Function(function)


def _window(storage: object, offset: object, shape: Any, strides: Any, *_: object) -> StorageWindow:
    is_valid = type(storage) is Storage and type(shape) is tuple and type(strides) is tuple
    is_valid = is_valid and len(shape) == len(strides) <= MAX_DIMENSIONS
    if not is_valid or not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, *shape, *strides)):
        raise ValueError("a tensor is malformed")
    assert isinstance(storage, Storage) and isinstance(offset, int)
    return StorageWindow(storage, offset, shape, strides)


def _empty_dict(*arguments: object) -> dict[str, object]:
    """Begin an ``OrderedDict``, whose items follow; ``dict`` itself would copy a list of any length."""
    if arguments:
        raise NotTensorsError(_EXECUTES)
    return {}


def _other(*_: object) -> None:
    """Replace a tensor that is not plain, which is refused where its name is known."""


_FUNCTIONS: Mapping[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): _empty_dict,
    ("torch._utils", "_rebuild_tensor_v2"): _window,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._utils", "_rebuild_sparse_tensor"): _other,
    ("torch.serialization", "_get_layout"): _other,
    ("torch", "Size"): _other,
}
