"""The innermost loops of the LoRA kernels: *streams*, which read weights once, and *tiles* of products in registers.

::

    stream_dot    products of a long run of weights and rows of inputs                  at the speed of memory
    stream_add    a long run of weights, times a factor for each row, into outputs
    dot           sums[i, j] += x[i, :] . w[j, :]       both are contiguous along the sum: a vector of sums per (i, j)
    axpy          out[i, :] += sum over k of s[i, k] b[k, :]      columns are contiguous: a number times a vector

A stream reads a row of weights for a row or two of inputs, then the next one: right behind it, or at the start of
another piece. A core by itself waits for memory wherever a page or a piece ends, so streams prefetch a later row.
Prefetching into the second-level cache pays. Into the first level it occupies the entries for the loop's own misses,
and is slower than none. The caller adds the numbers that do not fill a vector.

Each iteration of a tile loads a few vectors and multiplies each several times, so that arithmetic and not loading is
the limit. The caller cuts off the rest that does not fill a tile: ``dot_row`` and ``axpy_row`` take the remaining rows.
All arrays of tiles are one-dimensional, contiguous and float32; ``*_at`` is a tile's first number, ``*_stride`` the
distance of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    prefetch,
    row_addresses,
    spread,
    store,
    sum_lanes,
    zero_sums,
)

__all__ = [
    "AXPY_ROWS",
    "AXPY_WIDTH",
    "DOT_RANKS",
    "DOT_ROWS",
    "GROUP",
    "WIDE_ROWS",
    "WIDE_WIDTH",
    "axpy_row",
    "axpy_tile",
    "dot_row",
    "dot_tile",
    "stream_add",
    "stream_adds",
    "stream_dot",
    "stream_dots",
    "wide_row",
    "wide_tile",
]

_STREAM_VECTORS = 8  # weights of a run, in vectors; what does not fill one goes vector by vector

GROUP = 4  # rows of ``stream_dots`` and ``stream_adds``, which load weights once for all of them

_LINE_BYTES = 64

# The sums of a tile and the loaded operands fit in the registers together.
DOT_ROWS, DOT_RANKS = (4, 4) if HAS_32_REGISTERS else (2, 4)
AXPY_ROWS, _AXPY_VECTORS = (8, 2) if HAS_32_REGISTERS else (4, 2)

AXPY_WIDTH = _AXPY_VECTORS * LANES  # columns of ``axpy_tile`` and ``axpy_row``

# A row of a wide tile has sums enough to be added without waiting for one another.
WIDE_ROWS, _WIDE_VECTORS = (4, 4) if HAS_32_REGISTERS else (2, 4)

WIDE_WIDTH = _WIDE_VECTORS * LANES  # columns of ``wide_tile`` and ``wide_row``


def _prefetch_run(builder: Any, pointer: Any, first: Any, dtype: Any, number: int) -> None:
    """Prefetch the cache lines of ``number`` numbers from ``first`` on behind ``pointer``."""
    size = dtype.bitwidth // 8
    for line in range(-(-number * size // _LINE_BYTES)):
        prefetch(builder, pointer, builder.add(first, INT(line * _LINE_BYTES // size)))


def _runs(builder: Any, number: Any, num_vectors: int) -> Iterator[tuple[Any, int]]:
    """Generate the loops over ``number`` numbers, in runs of so many vectors and then one by one; LANES divides it.

    Yields the place of a run's first number and its vectors, for the caller to generate what is done with them.
    """
    whole = builder.sub(number, builder.srem(number, INT(num_vectors * LANES)))
    with cgutils.for_range_slice(builder, INT(0), whole, INT(num_vectors * LANES)) as (first, _):
        yield first, num_vectors
    with cgutils.for_range_slice(builder, whole, number, INT(LANES)) as (first, _):
        yield first, 1


def _make_stream_dot(num_rows: int) -> Any:
    num_vectors = _STREAM_VECTORS // num_rows

    @intrinsic  # type: ignore[untyped-decorator]
    def dot(
        typing_context: Any, weights: Any, at: Any, ahead: Any, x: Any, x_at: Any, x_stride: Any, number: Any
    ) -> Any:
        """Return products of ``number`` weights from ``at`` on and rows of ``x``; prefetch weights at ``ahead``.

        LANES divides ``number``; ``ahead`` may be any offset.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            dtype = kinds[0].dtype
            weights, at, ahead, x, x_at, x_stride, number = args
            w, coming = (address(context, builder, kinds[0], weights, first) for first in (at, ahead))
            rows = row_addresses(context, builder, kinds[3], x, x_at, x_stride, num_rows)
            sums = [zero_sums(builder, num_vectors) for _ in rows]
            for first, vectors in _runs(builder, number, num_vectors):
                _prefetch_run(builder, coming, first, dtype, vectors * LANES)
                for v in range(vectors):
                    place = builder.add(first, INT(v * LANES))
                    weight = load(builder, w, place, dtype)
                    for row, row_sums in zip(rows, sums, strict=True):
                        total = builder.load(row_sums[v])
                        vector = load(builder, row, place, types.float32)
                        builder.store(multiply_add(builder, weight, vector, total), row_sums[v])
            totals = []
            for row_sums in sums:
                parts = [builder.load(total) for total in row_sums]
                while len(parts) > 1:
                    parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                totals.append(sum_lanes(builder, parts[0]))
            return context.make_tuple(builder, signature.return_type, totals)

        result = types.UniTuple(types.float32, num_rows)
        return result(weights, at, ahead, x, x_at, x_stride, number), generate

    return dot


def _make_stream_add(num_rows: int) -> Any:
    num_vectors = _STREAM_VECTORS // num_rows

    @intrinsic  # type: ignore[untyped-decorator]
    def add(
        typing_context: Any,
        weights: Any,
        at: Any,
        ahead: Any,
        factors: Any,
        factors_at: Any,
        factors_stride: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
        number: Any,
    ) -> Any:
        """Add ``number`` weights from ``at`` on, times a factor for each row, to rows of ``out``; prefetch ``ahead``.

        LANES divides ``number``; ``ahead`` may be any offset.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            dtype = kinds[0].dtype
            weights, at, ahead, factors, factors_at, factors_stride, out, out_at, out_stride, number = args
            w, coming = (address(context, builder, kinds[0], weights, first) for first in (at, ahead))
            numbers = row_addresses(context, builder, kinds[3], factors, factors_at, factors_stride, num_rows)
            spreads = [spread(builder, builder.load(one)) for one in numbers]
            rows = row_addresses(context, builder, kinds[6], out, out_at, out_stride, num_rows)
            for first, width in _runs(builder, number, num_vectors):
                _prefetch_run(builder, coming, first, dtype, width * LANES)
                places = [builder.add(first, INT(v * LANES)) for v in range(width)]
                vectors = [load(builder, w, place, dtype) for place in places]
                for row, factor in zip(rows, spreads, strict=True):
                    totals = [
                        multiply_add(builder, vector, factor, load(builder, row, place, types.float32))
                        for place, vector in zip(places, vectors, strict=True)
                    ]
                    for place, total in zip(places, totals, strict=True):
                        store(builder, total, row, place)
            return context.get_dummy_value()

        arguments = (weights, at, ahead, factors, factors_at, factors_stride, out, out_at, out_stride, number)
        return types.void(*arguments), generate

    return add


stream_dot, stream_dots = _make_stream_dot(1), _make_stream_dot(GROUP)
stream_add, stream_adds = _make_stream_add(1), _make_stream_add(GROUP)


def _make_dot_tile(num_rows: int) -> Any:
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


def _make_axpy_tile(num_rows: int, num_vectors: int) -> Any:
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
        """Add ``factors weights`` to rows of ``out``; ``weights`` is ``[num_ranks, num_vectors * LANES]``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            factors, factors_at, factors_stride, weights, weights_at, num_ranks, out, out_at, out_stride = args
            factor_rows = row_addresses(context, builder, kinds[0], factors, factors_at, factors_stride, num_rows)
            panel = address(context, builder, kinds[3], weights, weights_at)
            columns = [INT(vector * LANES) for vector in range(num_vectors)]
            places = [
                (row, column)
                for row in row_addresses(context, builder, kinds[6], out, out_at, out_stride, num_rows)
                for column in columns
            ]
            sums = [cgutils.alloca_once_value(builder, load(builder, *place, types.float32)) for place in places]
            with cgutils.for_range(builder, num_ranks) as loop:
                first = builder.mul(loop.index, INT(num_vectors * LANES))
                vectors = [load(builder, panel, builder.add(first, column), types.float32) for column in columns]
                for row, factor_row in enumerate(factor_rows):
                    factor = spread(builder, builder.load(builder.gep(factor_row, [loop.index])))
                    for v, vector in enumerate(vectors):
                        total = sums[row * num_vectors + v]
                        builder.store(multiply_add(builder, factor, vector, builder.load(total)), total)
            for place, total in zip(places, sums, strict=True):
                store(builder, builder.load(total), *place)
            return context.get_dummy_value()

        arguments = (factors, factors_at, factors_stride, weights, weights_at, num_ranks, out, out_at, out_stride)
        return types.void(*arguments), generate

    return axpy


dot_tile, dot_row = _make_dot_tile(DOT_ROWS), _make_dot_tile(1)
axpy_tile, axpy_row = _make_axpy_tile(AXPY_ROWS, _AXPY_VECTORS), _make_axpy_tile(1, _AXPY_VECTORS)
wide_tile, wide_row = _make_axpy_tile(WIDE_ROWS, _WIDE_VECTORS), _make_axpy_tile(1, _WIDE_VECTORS)
