"""Triton's interpreter in a fraction of its time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

__all__ = ["speed_up"]


class _Nothing:
    def restore(self) -> None:
        """Leave the language as it is."""


def speed_up() -> None:
    """Spare the interpreter what costs it most of its time, in this process, whose launches are on one thread.

    It replaces the functions of Triton's language for a launch, and goes through all of them again at each call of a
    function within; here they stay replaced, since a process that interprets compiles nothing. It computes whether
    integers of fewer than 64 bits overflow, and says so only where it debugs. It makes a type, a shape and their texts
    for each value; here values of one type share them. A release of Triton that has other names inside stays slow.
    """
    from triton.runtime import interpreter

    try:
        patch = interpreter._patch_lang
        languages = (interpreter.tl, interpreter.tl.core)
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
        _share_types(interpreter)
        interpreter._patch_attr = _once_named(interpreter.interpreter_semantic)
    except (AttributeError, TypeError):
        return
    seen_by: dict[Any, tuple[bool, ...]] = {}  # the languages that a function sees
    patched: set[tuple[bool, ...]] = set()

    def patch_once(function: Any) -> object:
        if function not in seen_by:
            values = function.__globals__.values()
            seen_by[function] = tuple(any(value is one for value in values) for one in languages)
        if seen_by[function] not in patched:
            patched.add(seen_by[function])
            patch(function)
        return _Nothing()

    interpreter._patch_lang = patch_once


def _once_named(semantic: object) -> Callable[..., None]:
    """Return what replaces a function of the language, without a copy of each call's arguments."""

    def patch_attribute(owner: object, name: str, member: Any, builder: object, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # beneath the check that a call names its semantic

        def call(*args: object, **kwargs: object) -> object:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch_attribute


def _share_types(interpreter: Any) -> None:
    """Let values of one type share its parts, which nobody changes, and compare types and shapes without copies."""
    core = interpreter.tl.core
    make_block, np_dtype, equals = core.block_type.__init__, interpreter._get_np_dtype, core.tuple.__eq__
    blocks: dict[tuple[str, tuple[object, ...]], dict[str, object]] = {}
    np_dtypes: dict[str, object] = {}
    shapes: dict[tuple[object, ...], object] = {}
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def parts_of(shape: Any) -> tuple[object, object]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    core.dtype.parts_of_value = parts_of(())

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        if (found := blocks.get(key)) is None:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1], self.shape)
            self.parts_of_value = parts_of(self.shape)
            found = blocks[key] = dict(self.__dict__)
        self.__dict__.update(found)

    def init_tensor(self: Any, handle: object, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.parts_of_value

    def find_np_dtype(tt_dtype: Any) -> object:
        if (found := np_dtypes.get(tt_dtype.name)) is None:
            found = np_dtypes[tt_dtype.name] = np_dtype(tt_dtype)
        return found

    def is_same_type(self: Any, other: Any) -> bool:
        other = getattr(other, "value", other)
        return isinstance(other, core.dtype) and self.name == other.name

    def is_same_shape(self: Any, other: Any) -> object:
        return core.constexpr(self.values == other.values) if type(other) is core.tuple else equals(self, other)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> object:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_others
    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    core.tuple.__eq__ = is_same_shape
    core.dtype.__eq__ = is_same_type
    core.dtype.__hash__ = lambda self: hash(self.name)
    interpreter._get_np_dtype = find_np_dtype
