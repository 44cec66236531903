"""Two loops that hold a small tile of a product in registers.

::

    dot    sums[i, j] += x[i, :] . w[j, :]         both are contiguous along the sum: a vector of sums for each (i, j)
    axpy   out[i, :] += sum over k of s[i, k] b[k, :]      columns are contiguous: a number times a vector

Each iteration loads a few vectors and multiplies each several times, so that arithmetic and not loading is the limit.
The caller cuts off the rest that does not fill a tile: ``dot_row`` and ``axpy_row`` take the remaining rows. All arrays
are one-dimensional, contiguous and float32; ``*_at`` is a tile's first number, ``*_stride`` the distance of its rows.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from manylora.execution.kernels.cpu.vectors import (
    HAS_32_REGISTERS,
    INT,
    LANES,
    address,
    load,
    multiply_add,
    row_addresses,
    spread,
    store,
    sum_lanes,
    zero_sums,
)

__all__ = ["AXPY_ROWS", "AXPY_WIDTH", "DOT_RANKS", "DOT_ROWS", "axpy_row", "axpy_tile", "dot_row", "dot_tile"]

# The sums of a tile and the loaded operands fit in the registers together.
DOT_ROWS, DOT_RANKS = (4, 4) if HAS_32_REGISTERS else (2, 4)
AXPY_ROWS, _AXPY_VECTORS = (8, 2) if HAS_32_REGISTERS else (4, 2)

AXPY_WIDTH = _AXPY_VECTORS * LANES
"""Columns of ``axpy_tile`` and ``axpy_row``."""


def _make_dot(num_rows: int) -> Any:
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
        """Add products of rows of ``x`` and DOT_RANKS rows of ``weights`` to ``out``; LANES divides ``num_cols``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            x, x_at, x_stride, weights, weights_stride, num_cols, out, out_at, out_stride = args
            x_rows = row_addresses(context, builder, kinds[0], x, x_at, x_stride, num_rows)
            w_rows = row_addresses(context, builder, kinds[3], weights, INT(0), weights_stride, DOT_RANKS)
            sums = [zero_sums(builder, DOT_RANKS) for _ in range(num_rows)]
            with cgutils.for_range_slice(builder, INT(0), num_cols, INT(LANES)) as (col, _):
                vectors = [load(builder, row, col, types.float32) for row in x_rows]
                for rank, w_row in enumerate(w_rows):
                    weight = load(builder, w_row, col, types.float32)
                    for vector, row_sums in zip(vectors, sums, strict=True):
                        total = multiply_add(builder, vector, weight, builder.load(row_sums[rank]))
                        builder.store(total, row_sums[rank])
            for place, row_sums in zip(
                row_addresses(context, builder, kinds[6], out, out_at, out_stride, num_rows), sums, strict=True
            ):
                for rank, total in enumerate(row_sums):
                    target = builder.gep(place, [INT(rank)])
                    number = sum_lanes(builder, builder.load(total))
                    builder.store(builder.fadd(builder.load(target), number), target)
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
        """Add ``factors weights`` to rows of ``out``; ``weights`` is ``[num_ranks, AXPY_WIDTH]``, without gaps."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            factors, factors_at, factors_stride, weights, weights_at, num_ranks, out, out_at, out_stride = args
            factor_rows = row_addresses(context, builder, kinds[0], factors, factors_at, factors_stride, num_rows)
            panel = address(context, builder, kinds[3], weights, weights_at)
            columns = [INT(vector * LANES) for vector in range(_AXPY_VECTORS)]
            places = [
                (row, column)
                for row in row_addresses(context, builder, kinds[6], out, out_at, out_stride, num_rows)
                for column in columns
            ]
            sums = [cgutils.alloca_once_value(builder, load(builder, *place, types.float32)) for place in places]
            with cgutils.for_range(builder, num_ranks) as loop:
                first = builder.mul(loop.index, INT(AXPY_WIDTH))
                vectors = [load(builder, panel, builder.add(first, column), types.float32) for column in columns]
                for row, factor_row in enumerate(factor_rows):
                    factor = spread(builder, builder.load(builder.gep(factor_row, [loop.index])))
                    for v, vector in enumerate(vectors):
                        total = sums[row * _AXPY_VECTORS + v]
                        builder.store(multiply_add(builder, factor, vector, builder.load(total)), total)
            for place, total in zip(places, sums, strict=True):
                store(builder, builder.load(total), *place)
            return context.get_dummy_value()

        arguments = (factors, factors_at, factors_stride, weights, weights_at, num_ranks, out, out_at, out_stride)
        return types.void(*arguments), generate

    return axpy


dot_tile, dot_row = _make_dot(DOT_ROWS), _make_dot(1)
axpy_tile, axpy_row = _make_axpy(AXPY_ROWS), _make_axpy(1)
