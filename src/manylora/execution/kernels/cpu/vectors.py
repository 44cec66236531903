"""Vectors of the processor in compiled loops: loading, widening, multiplying and adding them.

numba compiles scalar loops and leaves vectors to LLVM. Where that is not enough (a block of sums that must stay in
registers, or a prefetched stream), ``loops`` builds the innermost loop in LLVM's language from these
functions.

numba has no bfloat16 and no float16 on a CPU, so arrays hold their bits: as uint16 for bfloat16, as int16 for float16.
The loops are written once; the array's type selects the conversion to float32, in registers and exact.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "HAS_32_REGISTERS",
    "INT",
    "LANES",
    "VECTOR",
    "address",
    "as_float32",
    "by_type",
    "from_bits",
    "load",
    "magnitude_bits",
    "multiply_add",
    "nearest",
    "prefetch",
    "round_to_even",
    "row_addresses",
    "spread",
    "store",
    "sum_lanes",
    "typed_views",
    "widen",
    "zero_sums",
]

_FEATURES = llvmlite.binding.get_host_cpu_features()

LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4  # float32 numbers in a vector

HAS_32_REGISTERS = LANES != 8
"""Whether the processor has 32 vector registers, or 16. (With four lanes, only old x86 has 16.)"""

_FLOAT, _WORD, INT = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(_FLOAT, LANES)


def address(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """Return the address of element ``at`` of a one-dimensional, contiguous array."""
    pointer = context.make_array(array_type)(context, builder, array).data
    return builder.gep(pointer, [at], inbounds=True)


def row_addresses(
    context: Any, builder: Any, array_type: Any, array: Any, at: Any, stride: Any, num_rows: int
) -> list[Any]:
    """Return the addresses of rows that are ``stride`` elements apart, the first at ``at``."""
    return [
        address(context, builder, array_type, array, builder.add(at, builder.mul(stride, INT(row))))
        for row in range(num_rows)
    ]


def load(builder: Any, pointer: Any, at: Any, dtype: Any) -> Any:
    """Return elements ``[at, at + LANES)`` from ``pointer``, of numba's type ``dtype``, as float32."""
    raw = ir.VectorType(_FLOAT if dtype.bitwidth == 32 else ir.IntType(16), LANES)
    place = builder.bitcast(builder.gep(pointer, [at]), raw.as_pointer())
    return widen(builder, dtype, builder.load(place, align=dtype.bitwidth // 8), LANES)


def store(builder: Any, vector: Any, pointer: Any, at: Any) -> None:
    """Write a vector of float32 to elements ``[at, at + LANES)`` from ``pointer``."""
    builder.store(vector, builder.bitcast(builder.gep(pointer, [at]), VECTOR.as_pointer()), align=4)


def spread(builder: Any, number: Any) -> Any:
    """Return a vector with ``number`` in every lane."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(_WORD, LANES), 0)
    return builder.shuffle_vector(builder.insert_element(nothing, number, _WORD(0)), nothing, lanes)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a b + c``, rounded once where the processor can."""
    return builder.fadd(builder.fmul(a, b, flags=["contract"]), c, flags=["contract"])


def sum_lanes(builder: Any, vector: Any) -> Any:
    """Return the sum of a vector's lanes, in any order."""
    kind = ir.FunctionType(_FLOAT, [_FLOAT, VECTOR])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    return builder.call(reduce, [ir.Constant(_FLOAT, 0.0), vector], fastmath=["reassoc"])


def zero_sums(builder: Any, number: int) -> list[Any]:
    """Return variables that hold a vector of zeros; they become registers."""
    return [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for _ in range(number)]


def prefetch(builder: Any, pointer: Any, at: Any) -> None:
    """Prefetch the cache line of element ``at`` into the second-level cache; any address is allowed."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _WORD, _WORD, _WORD])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    place = builder.bitcast(builder.gep(pointer, [at]), ir.IntType(8).as_pointer())
    builder.call(function, [place, _WORD(0), _WORD(2), _WORD(1)])


@intrinsic  # type: ignore[untyped-decorator]
def as_float32(typing_context: Any, value: Any) -> Any:
    """Return a float32, the bits of a bfloat16 (uint16) or those of a float16 (int16) as float32."""
    return types.float32(value), lambda context, builder, signature, args: widen(builder, value, args[0])


def _typed_views(place: Any, num_bytes: int) -> Any:
    """Return the same memory three times, for weights of float32, bfloat16 and float16."""
    return (
        carray(place, num_bytes // 4, np.float32),
        carray(place, num_bytes // 2, np.uint16),
        carray(place, num_bytes // 2, np.int16),
    )


typed_views = njit(cache=True)(_typed_views)


def by_type(function: Any) -> Any:
    """Return a loop that calls ``function(views[dtype], *arguments)``, given ``dtype``, ``views`` and the arguments.

    Compiled code does not index a tuple whose arrays have several types, as those of ``typed_views`` have.
    """

    @njit  # type: ignore[untyped-decorator]
    def chosen(dtype: Any, views: Any, *arguments: Any) -> None:
        if dtype == 0:
            function(views[0], *arguments)
        elif dtype == 1:
            function(views[1], *arguments)
        else:
            function(views[2], *arguments)

    return chosen


@intrinsic  # type: ignore[untyped-decorator]
def nearest(typing_context: Any, value: Any) -> Any:
    """Return a float32 rounded to a whole number, to the even one of two that are as near."""
    return types.float32(types.float32), lambda context, builder, signature, args: round_to_even(
        builder, args[0], "f32"
    )


def round_to_even(builder: Any, value: Any, kind: str = f"v{LANES}f32") -> Any:
    """Return ``value``, a vector or of ``kind``, rounded to whole numbers."""
    signature = ir.FunctionType(value.type, [value.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.rint.{kind}"), [value])


@intrinsic  # type: ignore[untyped-decorator]
def magnitude_bits(typing_context: Any, value: Any) -> Any:
    """Return the bits of ``abs(value)`` of a float32 as int32: they grow with it, and are largest beyond all numbers.

    Comparing them compares magnitudes, in an order that has a place for NaN: such a loop becomes vectors.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(builder.bitcast(args[0], _WORD), _WORD(0x7FFFFFFF))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def from_bits(typing_context: Any, bits: Any) -> Any:
    """Return the float32 of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32 if bits == types.int32 else types.uint32), generate


def widen(builder: Any, dtype: Any, bits: Any, lanes: int | None = None) -> Any:
    """Return ``bits`` of numba's type ``dtype`` as float32: ``lanes`` numbers in a vector, or one number."""
    word: Any = ir.IntType(32) if lanes is None else ir.VectorType(ir.IntType(32), lanes)
    real: Any = ir.FloatType() if lanes is None else ir.VectorType(ir.FloatType(), lanes)
    if dtype == types.float32:
        return bits
    return {types.uint16: _from_bfloat16, types.int16: _from_float16}[dtype](builder, bits, word, real)


def _from_bfloat16(builder: Any, bits: Any, word: Any, real: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, word), ir.Constant(word, 16)), real)


def _from_float16(builder: Any, bits: Any, word: Any, real: Any) -> Any:
    """Move exponent and mantissa to their places in float32 and correct the bias by a product.

    The processor's own instruction is not used: where it is missing, the compiler would call a function that does not
    exist. Exact for every finite number, subnormal ones too; weights are checked to be finite.
    """
    wide = builder.zext(bits, word)
    moved = builder.shl(builder.and_(wide, ir.Constant(word, 0x7FFF)), ir.Constant(word, 13))
    scaled = builder.fmul(builder.bitcast(moved, real), ir.Constant(real, 2.0**112))
    sign = builder.shl(builder.and_(wide, ir.Constant(word, 0x8000)), ir.Constant(word, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, word), sign), real)
