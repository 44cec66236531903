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

MAX_OPCODES = 500_000
"""About thirty for a tensor: ten times those of a large adapter."""
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


def run_pickle(program: bytes, find_storage: Callable[[str], tuple[int, int]]) -> object:
    """Return the object that a pickle describes, with tensors as windows.

    Args:
        program: The pickle.
        find_storage: Returns the place of a storage by its key; called once for each.

    Raises:
        NotTensorsError: It holds more than tensors by name.
        Exception: It is damaged.
    """
    return _Machine(find_storage).run(program)


class _Machine:
    """A stack, marks on it, and a memo."""

    def __init__(self, find_storage: Callable[[str], tuple[int, int]]) -> None:
        self._find = find_storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self._storages: dict[str, Storage] = {}

    def run(self, program: bytes) -> object:
        for number, (opcode, argument, _) in enumerate(genops(program)):
            if number >= MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                break
            act = _ACTIONS.get(opcode.name)
            if act is None:
                raise NotTensorsError("holds more than tensors, and is not executed")
            act(self, argument)
        (result,) = self._stack
        return result

    def push(self, value: object) -> None:
        self._stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        first = self._marks.pop()
        if first > len(self._stack):
            raise ValueError("a mark lies above the stack")
        values = self._stack[first:]
        del self._stack[first:]
        return values

    def mark(self, _: object) -> None:
        self._marks.append(len(self._stack))

    def tuple_of(self, num: int) -> None:
        values = tuple(self._stack[len(self._stack) - num :]) if num else ()
        if len(values) != num:
            raise ValueError("the stack is too short")
        del self._stack[len(self._stack) - num :]
        self.push(values)

    def put(self, index: int) -> None:
        if index > MAX_OPCODES:
            raise ValueError("its memo is too large")
        self._memo[index] = self._stack[-1]

    def extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to an object that is no list")
        target += values

    def set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError("it sets items of an object that has none")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                raise NotTensorsError(f"holds more than tensors by name: a {type(key).__name__}")
            target[key] = value

    def append(self, _: object) -> None:
        self.extend([self._stack.pop()])

    def set_item(self, _: object) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items([key, value])

    def load_global(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        if module in ("torch", "torch.storage") and attribute in STORAGES:
            self.push(STORAGES[attribute])
        elif (function := _FUNCTIONS.get((module, attribute))) is not None:
            self.push(_Function(function))
        else:
            raise NotTensorsError("holds more than tensors, and is not executed")

    def reduce(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not _Function or type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            raise NotTensorsError("holds more than tensors, and is not executed")
        self.push(function.call(*arguments))

    def build(self, _: object) -> None:
        """Pass over the state of a dictionary, where PyTorch keeps versions of modules."""
        self._stack.pop()
        if type(self._stack[-1]) is not dict:
            raise ValueError("it sets the state of an object that has none")

    def load_storage(self, _: object) -> None:
        """Push the storage that ``('storage', type, key, place, number of elements)`` names."""
        kind, dtype, key = self._stack.pop()[:3]
        if kind != "storage" or dtype not in STORAGES.values() or type(key) is not str:
            raise ValueError("it refers to an object that is no storage")
        if key not in self._storages:
            self._storages[key] = Storage(dtype, self._find(key))
        if self._storages[key].dtype != dtype:
            raise ValueError("a storage has two types")
        self.push(self._storages[key])


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
        raise NotTensorsError("holds more than tensors, and is not executed")
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

_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "MARK": _Machine.mark,
    "GLOBAL": _Machine.load_global,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.load_storage,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "BININT": _Machine.push,
    "BININT1": _Machine.push,
    "BININT2": _Machine.push,
    "LONG1": _Machine.push,
    "BINFLOAT": _Machine.push,
    "BINUNICODE": _Machine.push,
    "SHORT_BINSTRING": _Machine.push,
    "BINSTRING": _Machine.push,
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": _Machine.append,
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": lambda machine, index: machine.push(machine._memo[index]),
    "LONG_BINGET": lambda machine, index: machine.push(machine._memo[index]),
}
"""The opcodes of protocol 2 that PyTorch writes."""
