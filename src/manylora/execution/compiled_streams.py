"""Two loops that read a long run of weights once, as fast as memory gives it.

A row of weights is read for a row or two of inputs, and then the next one: right behind it, or where the next piece
of some adapter begins. Left to itself a core waits for memory wherever a page or a piece ends. So while a row is worked
on, both loops ask for one that will come soon. Asking as far as the second-level cache is what pays; asking for the
first level takes the places in which its own misses wait, and is slower than not asking at all.

What does not fill a run of RUN numbers is the caller's to add.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from manylora.execution.compiled_vectors import (
    INT,
    LANES,
    address,
    load,
    multiply_add,
    prefetch,
    spread,
    store,
    sum_lanes,
    zero_sums,
)

__all__ = ["RUN", "stream_add", "stream_dot"]

_VECTORS = 8
RUN = _VECTORS * LANES
"""Numbers that are taken at a time."""

_LINE_BYTES = 64


def _ask_for(builder: Any, pointer: Any, first: Any, dtype: Any) -> None:
    """Ask for the lines of the run that begins at ``first`` behind ``pointer``."""
    size = dtype.bitwidth // 8
    for line in range(-(-RUN * size // _LINE_BYTES)):
        prefetch(builder, pointer, builder.add(first, INT(line * _LINE_BYTES // size)))


@intrinsic  # type: ignore[untyped-decorator]
def stream_dot(typing_context: Any, weights: Any, at: Any, ahead: Any, vector: Any, number: Any) -> Any:
    """Return the dot product of ``number`` weights from ``at`` on and ``vector``; ask for those from ``ahead`` on.

    ``number`` is a multiple of RUN; ``ahead`` may lie anywhere.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = signature.args[0].dtype
        weights, at, ahead, vector, number = args
        w, coming = (address(context, builder, signature.args[0], weights, first) for first in (at, ahead))
        x = address(context, builder, signature.args[3], vector, INT(0))
        sums = zero_sums(builder, _VECTORS)
        with cgutils.for_range_slice(builder, INT(0), number, INT(RUN)) as (first, _):
            _ask_for(builder, coming, first, dtype)
            for v, total in enumerate(sums):
                at = builder.add(first, INT(v * LANES))
                product = multiply_add(
                    builder, load(builder, w, at, dtype), load(builder, x, at, types.float32), builder.load(total)
                )
                builder.store(product, total)
        totals = [builder.load(total) for total in sums]
        while len(totals) > 1:
            totals = [builder.fadd(a, b) for a, b in zip(totals[::2], totals[1::2], strict=True)]
        return sum_lanes(builder, totals[0])

    return types.float32(weights, at, ahead, vector, number), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream_add(typing_context: Any, weights: Any, at: Any, ahead: Any, factor: Any, target: Any, number: Any) -> Any:
    """Add ``factor`` times ``number`` weights from ``at`` on to ``target``; ask for those from ``ahead`` on.

    ``number`` is a multiple of RUN; ``ahead`` may lie anywhere.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = signature.args[0].dtype
        weights, at, ahead, factor, target, number = args
        w, coming = (address(context, builder, signature.args[0], weights, first) for first in (at, ahead))
        out = address(context, builder, signature.args[4], target, INT(0))
        factor = spread(builder, factor)
        with cgutils.for_range_slice(builder, INT(0), number, INT(RUN)) as (first, _):
            _ask_for(builder, coming, first, dtype)
            places = [builder.add(first, INT(v * LANES)) for v in range(_VECTORS)]
            totals = [
                multiply_add(builder, load(builder, w, at, dtype), factor, load(builder, out, at, types.float32))
                for at in places
            ]
            for at, total in zip(places, totals, strict=True):
                store(builder, total, out, at)
        return context.get_dummy_value()

    return types.void(weights, at, ahead, factor, target, number), generate
