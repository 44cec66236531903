"""Atomic words in memory that a device or another thread writes meanwhile, for compiled loops.

A plain loop over memory is no wait: the compiler reads the word once, and ``while words[0] == 0: pass`` becomes a jump
to itself. An atomic load is repeated. Loads acquire and stores release: memory that was written before a store is seen
behind the load that sees it.

Only imported where numba is installed (``support.find_compiled``).
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["call", "compare_exchange", "load_word", "pointer_to", "relax", "store_word", "yield_core"]

_WORD_BYTES = 4
_IS_X86 = platform.machine() in ("x86_64", "AMD64")

yield_core = types.ExternalFunction("sched_yield", types.int32())  # let another thread have the core


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    words = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(words.data, [args[1]], inbounds=True)


@intrinsic  # type: ignore[untyped-decorator]
def load_word(typing_context: Any, words: Any, index: Any) -> Any:
    """Return ``words[index]`` of an array of uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, args), "acquire", _WORD_BYTES)

    return types.uint32(words, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_word(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """Write ``words[index]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _place(context, builder, signature, args), "release", _WORD_BYTES)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def compare_exchange(typing_context: Any, words: Any, index: Any, expected: Any, value: Any) -> Any:
    """Write ``words[index]`` if it is ``expected``, in one step; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature, args)
        return builder.extract_value(builder.cmpxchg(place, args[2], args[3], "acq_rel", "acquire"), 1)

    return types.boolean(words, types.int64, types.uint32, types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def relax(typing_context: Any) -> Any:
    """Tell the processor that this loop waits: its other thread goes on, and the loop ends without a penalty."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def call(typing_context: Any, function: Any, pointers: Any) -> Any:
    """Call the compiled kernel (``openmp.compile_kernel``) at the address ``function`` with its array of pointers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer().as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(typing_context: Any, place: Any) -> Any:
    """Return an address as a pointer, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate
