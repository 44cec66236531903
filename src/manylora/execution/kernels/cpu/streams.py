"""Two loops that read a long run of weights once, at the speed of memory.

A row of weights is read for a row or two of inputs, then the next one: right behind it, or at the start of another
piece. A core by itself waits for memory wherever a page or a piece ends, so both loops prefetch a later row.
Prefetching into the second-level cache pays. Into the first level it occupies the entries for the loop's own misses,
and is slower than none.

The caller adds the numbers that do not fill a run of RUN.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from manylora.execution.kernels.cpu.vectors import (
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

__all__ = ["GROUP", "RUN", "stream_add", "stream_adds", "stream_dot", "stream_dots"]

_VECTORS = 8
RUN = _VECTORS * LANES
"""The number of weights of a call is a multiple of it."""

GROUP = 4
"""Rows of ``stream_dots`` and ``stream_adds``, which load weights once for all of them."""

_LINE_BYTES = 64


def _prefetch_run(builder: Any, pointer: Any, first: Any, dtype: Any, number: int) -> None:
    """Prefetch the cache lines of ``number`` numbers from ``first`` on behind ``pointer``."""
    size = dtype.bitwidth // 8
    for line in range(-(-number * size // _LINE_BYTES)):
        prefetch(builder, pointer, builder.add(first, INT(line * _LINE_BYTES // size)))


def _make_dot(num_rows: int) -> Any:
    num_vectors = _VECTORS // num_rows

    @intrinsic  # type: ignore[untyped-decorator]
    def dot(
        typing_context: Any, weights: Any, at: Any, ahead: Any, x: Any, x_at: Any, x_stride: Any, number: Any
    ) -> Any:
        """Return products of ``number`` weights from ``at`` on and rows of ``x``; prefetch weights at ``ahead``.

        ``number`` is a multiple of RUN; ``ahead`` may be any offset.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            dtype = kinds[0].dtype
            weights, at, ahead, x, x_at, x_stride, number = args
            w, coming = (address(context, builder, kinds[0], weights, first) for first in (at, ahead))
            rows = row_addresses(context, builder, kinds[3], x, x_at, x_stride, num_rows)
            sums = [zero_sums(builder, num_vectors) for _ in rows]
            with cgutils.for_range_slice(builder, INT(0), number, INT(num_vectors * LANES)) as (first, _):
                _prefetch_run(builder, coming, first, dtype, num_vectors * LANES)
                for v in range(num_vectors):
                    place = builder.add(first, INT(v * LANES))
                    weight = load(builder, w, place, dtype)
                    for row, row_sums in zip(rows, sums, strict=True):
                        total = builder.load(row_sums[v])
                        vector = load(builder, row, place, types.float32)
                        builder.store(multiply_add(builder, weight, vector, total), row_sums[v])
            totals = []
            for row_sums in sums:
                vectors = [builder.load(total) for total in row_sums]
                while len(vectors) > 1:
                    vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
                totals.append(sum_lanes(builder, vectors[0]))
            return context.make_tuple(builder, signature.return_type, totals)

        result = types.UniTuple(types.float32, num_rows)
        return result(weights, at, ahead, x, x_at, x_stride, number), generate

    return dot


def _make_add(num_rows: int) -> Any:
    num_vectors = _VECTORS // num_rows

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

        ``number`` is a multiple of RUN; ``ahead`` may be any offset.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            dtype = kinds[0].dtype
            weights, at, ahead, factors, factors_at, factors_stride, out, out_at, out_stride, number = args
            w, coming = (address(context, builder, kinds[0], weights, first) for first in (at, ahead))
            numbers = row_addresses(context, builder, kinds[3], factors, factors_at, factors_stride, num_rows)
            spreads = [spread(builder, builder.load(one)) for one in numbers]
            rows = row_addresses(context, builder, kinds[6], out, out_at, out_stride, num_rows)
            with cgutils.for_range_slice(builder, INT(0), number, INT(num_vectors * LANES)) as (first, _):
                _prefetch_run(builder, coming, first, dtype, num_vectors * LANES)
                places = [builder.add(first, INT(v * LANES)) for v in range(num_vectors)]
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


stream_dot, stream_dots = _make_dot(1), _make_dot(GROUP)
stream_add, stream_adds = _make_add(1), _make_add(GROUP)
