"""Weights in the order that ``coded`` and ``decoded`` read, and their rounding to codes of 8 or 4 bits.

Loops over one matrix, for one thread: the interpreter lock is free meanwhile, so a loader runs one in each thread.

Source: the rounding to 4 bits tries several steps and takes the best in the least squares, as llama.cpp does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from manylora.execution.kernels.cpu.forms import BLOCK, TILE
from manylora.execution.kernels.cpu.openmp import FAST_MATH
from manylora.execution.kernels.cpu.vectors import (
    INT,
    LANES,
    VECTOR,
    address,
    as_float32,
    from_bits,
    load,
    magnitude_bits,
    multiply_add,
    nearest,
    round_to_even,
    spread,
    store,
    zero_sums,
)

__all__ = ["find_peaks", "find_steps", "pack_words", "round_weights", "tile_groups"]

_WIDEST = 0.2
"""Steps of 4-bit codes are tried from the one that reaches a group's largest number to those smaller by this part."""


def tile_groups(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return scales or shifts ``[out, groups]`` in the order of tiles, ``[tiles, groups, TILE]``, flat."""
    num_out, num_groups = numbers.shape
    full = np.zeros((-(-num_out // TILE) * TILE, num_groups), numbers.dtype)
    full[:num_out] = numbers
    return np.ascontiguousarray(full.reshape(-1, TILE, num_groups).transpose(0, 2, 1)).reshape(-1)


def pack_words(codes: NDArray[Any], bits: int, target: NDArray[np.uint8], fill: int = 0) -> None:
    """Write ``codes`` ``[out, in]``, uint8 (or uint16 for 16 bits), to ``target``; ``fill`` is the padding's code."""
    _PACK[bits](codes, target.view(np.uint32), np.uint32(fill))


def _make_pack(bits: int) -> Any:
    per_word = 32 // bits

    @njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
    def pack(codes: Any, words: Any, fill: Any) -> None:
        num_out, num_in = codes.shape
        num_steps = -(-num_in // BLOCK) * BLOCK // per_word
        for tile in range(-(-num_out // TILE)):
            for o in range(TILE):
                row = tile * TILE + o
                at = tile * num_steps * TILE + o
                for step in range(num_steps):
                    word = np.uint32(0)
                    for j in range(per_word):
                        k = per_word * step + j
                        code = np.uint32(codes[row, k]) if row < num_out and k < num_in else fill
                        word |= code << np.uint32(bits * j if bits > 4 else 8 * (j % 4) + 4 * (j // 4))
                    words[at + step * TILE] = word

    return pack


_PACK = {bits: _make_pack(bits) for bits in (4, 8, 16)}


@njit(cache=True, nogil=True, fastmath=FAST_MATH)  # type: ignore[untyped-decorator]
def find_peaks(weights: Any, group: int, peaks: Any) -> None:
    """Write the largest magnitude of each group of ``weights`` ``[out, in]`` to ``peaks`` ``[out, groups]``.

    ``weights`` are float32, or the bits of 16-bit numbers as in ``vectors``. A group that is not finite has a peak
    that is not.
    """
    num_out, num_in = weights.shape
    for o in range(num_out):
        for g in range(peaks.shape[1]):
            highest = np.int32(0)
            for k in range(g * group, min((g + 1) * group, num_in)):
                bits = magnitude_bits(as_float32(weights[o, k]))
                highest = bits if bits > highest else highest
            peaks[o, g] = from_bits(highest)


@intrinsic  # type: ignore[untyped-decorator]
def try_steps(typing_context: Any, numbers: Any, count: Any, inverses: Any, dots: Any, squares: Any) -> Any:
    """Round ``numbers[:count]`` in ``LANES`` steps of 4-bit codes, each the inverse of one of ``inverses``.

    Write the codes' products with the numbers to ``dots``, and with themselves to ``squares``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        numbers, inverses, dots, squares = (address(context, builder, kinds[i], args[i], INT(0)) for i in (0, 2, 3, 4))
        tried = load(builder, inverses, INT(0), types.float32)
        dot, square = zero_sums(builder, 2)
        with cgutils.for_range(builder, args[1]) as loop:
            number = spread(builder, builder.load(builder.gep(numbers, [loop.index])))
            code = round_to_even(builder, builder.fmul(number, tried))
            for bound, order in ((-8.0, "<"), (7.0, ">")):
                limit = ir.Constant(VECTOR, [bound] * LANES)
                code = builder.select(builder.fcmp_ordered(order, code, limit), limit, code)
            builder.store(multiply_add(builder, number, code, builder.load(dot)), dot)
            builder.store(multiply_add(builder, code, code, builder.load(square)), square)
        store(builder, builder.load(dot), dots, INT(0))
        store(builder, builder.load(square), squares, INT(0))
        return context.get_dummy_value()

    return types.void(numbers, count, inverses, dots, squares), generate


@njit(cache=True, nogil=True, fastmath=FAST_MATH)  # type: ignore[untyped-decorator]
def find_steps(weights: Any, group: int, steps: Any) -> None:
    """Write the step of 4-bit codes, -8 to 7, for each group to ``steps`` ``[out, groups]``; it may be negative.

    The step that gives the number of largest magnitude the code -8, and smaller steps, are tried: the one with the
    least sum of squared errors is taken.
    """
    num_out, num_in = weights.shape
    inverses, dots, squares = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    found, own = np.empty(LANES, np.int32), np.empty(group, np.float32)
    for o in range(num_out):
        for g in range(steps.shape[1]):
            line = weights[o, g * group : min((g + 1) * group, num_in)]
            highest = lowest = np.int32(0)
            for i in range(line.shape[0]):
                value = as_float32(line[i])
                own[i] = value
                bits = magnitude_bits(value)
                highest = bits if bits > highest else highest
                bits = bits if value < np.float32(0.0) else np.int32(0)
                lowest = bits if bits > lowest else lowest
            peak = -from_bits(highest) if lowest == highest else from_bits(highest)
            unit = np.float32(-8.0) / peak if peak != 0.0 else np.float32(0.0)
            for t in range(LANES):
                inverses[t] = unit * (np.float32(1.0) + np.float32(_WIDEST / LANES) * np.float32(t))
            try_steps(own, line.shape[0], inverses, dots, squares)
            highest = np.int32(0)
            for t in range(LANES):
                found[t] = magnitude_bits(dots[t] * dots[t] / (squares[t] + np.float32(1e-30)))
                highest = found[t] if found[t] > highest else highest
            for t in range(LANES):
                if found[t] == highest:
                    steps[o, g] = dots[t] / (squares[t] + np.float32(1e-30))


@njit(cache=True, nogil=True, fastmath=FAST_MATH)  # type: ignore[untyped-decorator]
def round_weights(weights: Any, group: int, steps: Any, middle: int, codes: Any) -> None:
    """Write ``weights`` in whole ``steps`` ``[out, groups]`` to ``codes`` ``[out, in]``, uint8; ``middle`` is zero."""
    num_out, num_in = weights.shape
    low, high = np.float32(-middle), np.float32(middle - 1)
    for o in range(num_out):
        for g in range(steps.shape[1]):
            step = steps[o, g]
            inverse = np.float32(1.0) / step if step != 0.0 else np.float32(0.0)
            for k in range(g * group, min((g + 1) * group, num_in)):
                code = nearest(as_float32(weights[o, k]) * inverse)
                code = low if code < low else code
                code = high if code > high else code
                codes[o, k] = np.uint8(np.int32(code) + middle)
