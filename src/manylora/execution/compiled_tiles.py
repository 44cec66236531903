"""Two loops that hold a small tile of a product in registers, in the processor's own vectors.

numba compiles loops over scalars and leaves it to LLVM to find vectors in them; it finds them along one loop, but never
keeps a block of sums in registers over another. So the two innermost loops of a product are written in LLVM's language:

::

    dot    sums[i, j] = x[i, :] . w[j, :]        both rows lie along the sum: one vector of partial sums per (i, j)
    axpy   out[i, :] += sum_k s[i, k] b[k, :]    columns lie along the vector: one number of s times vectors of b

Per turn either loads a few vectors and multiplies each several times, so that the arithmetic and not the loading
decides. What is not a whole tile (odd rows, odd columns) is the caller's to cut off.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["AXPY_ROWS", "AXPY_WIDTH", "DOT_RANKS", "DOT_ROWS", "LANES", "axpy_row", "axpy_tile", "dot_row", "dot_tile"]

_FEATURES = llvmlite.binding.get_host_cpu_features()

LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4
"""Numbers of float32 in a vector."""

_HAS_32_REGISTERS = LANES != 8

# Sums, and what is loaded to be multiplied, in registers all at once.
DOT_ROWS, DOT_RANKS = (4, 4) if _HAS_32_REGISTERS else (2, 4)
AXPY_ROWS, _AXPY_VECTORS = (8, 2) if _HAS_32_REGISTERS else (4, 2)

AXPY_WIDTH = _AXPY_VECTORS * LANES
"""Columns that ``axpy_tile`` and ``axpy_row`` add to."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _address(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    pointer = context.make_array(array_type)(context, builder, array).data
    return builder.gep(pointer, [at], inbounds=True)


def _load(builder: Any, pointer: Any, at: Any) -> Any:
    place = builder.bitcast(builder.gep(pointer, [at], inbounds=True), _VECTOR.as_pointer())
    return builder.load(place, align=4)


def _spread(builder: Any, number: Any) -> Any:
    """Return a vector with ``number`` in every lane."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), lanes)


def _multiply_add(builder: Any, total: Any, a: Any, b: Any) -> None:
    product = builder.fmul(a, b, flags=["contract"])
    builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)


def _sum_lanes(builder: Any, vector: Any) -> Any:
    kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    return builder.call(reduce, [ir.Constant(_FLOAT, 0.0), vector], fastmath=["reassoc"])


def _zeros(builder: Any, number: int) -> list[Any]:
    return [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None)) for _ in range(number)]


def _make_dot(num_rows: int, num_ranks: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def dot(
        typing_context: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        weights: Any,
        weights_stride: Any,
        num_cols: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        """Add the dot products of rows of ``x`` and rows of ``weights`` to ``out``.

        ``num_cols`` is a multiple of LANES; ``weights`` begins at 0.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            x, x_at, x_stride, weights, weights_stride, num_cols, out, out_at, out_stride = args
            x_rows = [
                _address(context, builder, kinds[0], x, builder.add(x_at, builder.mul(x_stride, _INT(i))))
                for i in range(num_rows)
            ]
            w_rows = [
                _address(context, builder, kinds[3], weights, builder.mul(weights_stride, _INT(j)))
                for j in range(num_ranks)
            ]
            sums = _zeros(builder, num_rows * num_ranks)
            with cgutils.for_range_slice(builder, _INT(0), num_cols, _INT(LANES)) as (c, _):
                rows = [_load(builder, row, c) for row in x_rows]
                for j, w_row in enumerate(w_rows):
                    weight = _load(builder, w_row, c)
                    for i, row in enumerate(rows):
                        _multiply_add(builder, sums[i * num_ranks + j], row, weight)
            for i in range(num_rows):
                first = _address(context, builder, kinds[6], out, builder.add(out_at, builder.mul(out_stride, _INT(i))))
                for j in range(num_ranks):
                    place = builder.gep(first, [_INT(j)], inbounds=True)
                    total = _sum_lanes(builder, builder.load(sums[i * num_ranks + j]))
                    builder.store(builder.fadd(builder.load(place), total), place)
            return context.get_dummy_value()

        return types.void(x, x_at, x_stride, weights, weights_stride, num_cols, out, out_at, out_stride), generate

    return dot


def _make_axpy(num_rows: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def axpy(
        typing_context: Any,
        factors: Any,
        factors_at: Any,
        factors_stride: Any,
        weights: Any,
        weights_at: Any,
        num_ranks: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        """Add ``factors weights`` to AXPY_WIDTH columns of each row of ``out``.

        ``weights`` is ``[num_ranks, AXPY_WIDTH]`` and begins at ``weights_at``.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            factors, factors_at, factors_stride, weights, weights_at, num_ranks, out, out_at, out_stride = args
            f_rows = [
                _address(
                    context, builder, kinds[0], factors, builder.add(factors_at, builder.mul(factors_stride, _INT(i)))
                )
                for i in range(num_rows)
            ]
            o_rows = [
                _address(context, builder, kinds[6], out, builder.add(out_at, builder.mul(out_stride, _INT(i))))
                for i in range(num_rows)
            ]
            panel = _address(context, builder, kinds[3], weights, weights_at)
            sums = [
                cgutils.alloca_once_value(builder, _load(builder, row, _INT(v * LANES)))
                for row in o_rows
                for v in range(_AXPY_VECTORS)
            ]
            with cgutils.for_range(builder, num_ranks) as loop:
                at = builder.mul(loop.index, _INT(AXPY_WIDTH))
                vectors = [_load(builder, panel, builder.add(at, _INT(v * LANES))) for v in range(_AXPY_VECTORS)]
                for i, row in enumerate(f_rows):
                    factor = _spread(builder, builder.load(builder.gep(row, [loop.index], inbounds=True)))
                    for v, vector in enumerate(vectors):
                        _multiply_add(builder, sums[i * _AXPY_VECTORS + v], factor, vector)
            for i, row in enumerate(o_rows):
                for v in range(_AXPY_VECTORS):
                    place = builder.gep(row, [_INT(v * LANES)], inbounds=True)
                    total = builder.load(sums[i * _AXPY_VECTORS + v])
                    builder.store(total, builder.bitcast(place, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        arguments = (factors, factors_at, factors_stride, weights, weights_at, num_ranks, out, out_at, out_stride)
        return types.void(*arguments), generate

    return axpy


dot_tile, dot_row = _make_dot(DOT_ROWS, DOT_RANKS), _make_dot(1, DOT_RANKS)
axpy_tile, axpy_row = _make_axpy(AXPY_ROWS), _make_axpy(1)
