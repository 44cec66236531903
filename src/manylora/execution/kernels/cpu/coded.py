"""Products with weights that are kept as codes of 8 or 4 bits, and activations rounded to 8 bits in each row.

Each thread takes a share of the weights' tiles for all rows, so weights are read once for any number of rows up to
``ROW_BLOCK``. Activations are rounded first, each row by itself: in blocks of ``BLOCK`` inputs, to 127 steps of the
block's largest magnitude. A row's result is the same to the bit whatever rows are beside it.

Source: the arithmetic of llama.cpp's Q8_0 products (blocks of 32 activations with a scale each).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, njit
from numpy.typing import NDArray

from manylora.execution.kernels.cpu.forms import BLOCK, HALF_BLOCK, INT8, NUM_SIZES, TILE
from manylora.execution.kernels.cpu.integer_dots import MOST_ROWS, dots_4, dots_4_halved, dots_8, dots_8_halved
from manylora.execution.kernels.cpu.openmp import FAST_MATH, Team, barrier, compile_kernel, num_threads, thread_num
from manylora.execution.kernels.cpu.vectors import from_bits, magnitude_bits, nearest
from manylora.execution.kernels.cpu.widening import widen_tile

if TYPE_CHECKING:
    from manylora.execution.kernels.cpu.forms import NarrowForm

__all__ = ["coded_loop", "multiply_coded"]

ROW_BLOCK = 256  # rows whose activations stay in a cache while the weights pass


def multiply_coded(
    team: Team, x: torch.Tensor, address: int, form: NarrowForm, table: NDArray[np.float32]
) -> torch.Tensor:
    """Return ``x W^T``, ``[rows, out]``, for ``x`` ``[rows, in]``, float32 and contiguous, and weights at ``address``.

    ``table`` is not read: these weights are integers.
    """
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, form.num_out)
    num_blocks = -(-form.num_in // form.block)
    rounded = torch.empty(num_rows * num_blocks * form.block, dtype=torch.int8)
    row_scales = torch.empty(num_rows * num_blocks)
    row_sums = torch.empty(num_rows * num_blocks, dtype=torch.int32)
    scratch = torch.empty(torch.get_num_threads(), (2 * num_blocks + MOST_ROWS) * TILE)
    team.run(compile_kernel(coded_loop), form.sizes(num_rows), x, address, rounded, row_scales, row_sums, scratch, out)
    return out


def _round_row(x: Any, middle: int, rounded: Any, scales: Any, sums: Any) -> None:
    """Round one row of activations; what is not finite in it makes its block's scale NaN."""
    num_in, num_blocks = x.shape[0], scales.shape[0]
    size = rounded.shape[0] // num_blocks
    for block in range(num_blocks):
        own = x[block * size : min((block + 1) * size, num_in)]
        bits = np.int32(0)
        for i in range(own.shape[0]):
            own_bits = magnitude_bits(own[i])
            bits = own_bits if own_bits > bits else bits
        highest = from_bits(bits)
        factor = np.float32(127.0) / highest if highest > 0.0 else np.float32(0.0)
        codes = rounded[block * size : (block + 1) * size]
        total = np.int32(0)
        for i in range(own.shape[0]):
            code = np.int32(nearest(own[i] * factor))
            codes[i] = code
            total += code
        for i in range(own.shape[0], size):
            codes[i] = 0
        # The bits compare infinity and NaN above all numbers, and both are left as they are.
        scales[block] = highest / np.float32(127.0)
        sums[block] = -middle * total


def _dot_rows(
    kind: int,
    block: int,
    codes: Any,
    at: int,
    scales: Any,
    rounded: Any,
    row: int,
    count: int,
    row_scales: Any,
    row_sums: Any,
    out: Any,
) -> None:
    num_blocks = scales.shape[0] // TILE
    if kind == INT8 and block == HALF_BLOCK:
        dots_8_halved(count, codes, at, scales, rounded, row, num_blocks, row_scales, row_sums, out)
    elif kind == INT8:
        dots_8(count, codes, at, scales, rounded, row, num_blocks, row_scales, row_sums, out)
    elif block == HALF_BLOCK:
        dots_4_halved(count, codes, at, scales, rounded, row, num_blocks, row_scales, row_sums, out)
    else:
        dots_4(count, codes, at, scales, rounded, row, num_blocks, row_scales, row_sums, out)


def coded_loop(pointers: Any) -> None:
    """Multiply in one thread of a team; ``pointers`` as ``multiply_coded`` passes them."""
    thread, threads = thread_num(), num_threads()
    num_rows, num_in, num_out, kind, size, blocks_per_group, dtype, has_shift = carray(pointers[0], NUM_SIZES, np.int64)
    bits = 8 if kind == INT8 else 4
    num_blocks, num_tiles = -(-num_in // size), -(-num_out // TILE)
    num_groups = -(-num_blocks // blocks_per_group)
    tile_bytes = -(-num_in // BLOCK) * BLOCK * TILE * bits // 8
    middle = 1 << (bits - 1)
    x = carray(pointers[1], (num_rows, num_in), np.float32)
    numbers = num_tiles * num_groups * TILE * (2 if has_shift else 1)
    codes = carray(pointers[2], num_tiles * tile_bytes + 4 * numbers, np.uint8)
    rounded = carray(pointers[3], num_rows * num_blocks * size, np.int8)
    row_scales = carray(pointers[4], num_rows * num_blocks, np.float32)
    row_sums = carray(pointers[5], num_rows * num_blocks, np.int32)
    scratch = carray(pointers[6], (threads, 2 * num_blocks * TILE + MOST_ROWS * TILE), np.float32)[thread]
    out = carray(pointers[7], (num_rows, num_out), np.float32)
    for row in range(thread, num_rows, threads):
        line, first = slice(row * num_blocks * size, (row + 1) * num_blocks * size), row * num_blocks
        round_row(
            x[row], middle, rounded[line], row_scales[first : first + num_blocks], row_sums[first : first + num_blocks]
        )
    barrier()
    behind = codes[num_tiles * tile_bytes :]
    numbers_of = (behind.view(np.float32), behind.view(np.uint16), behind.view(np.int16))
    shifts_of = (
        numbers_of[0][num_tiles * num_groups * TILE :],
        numbers_of[1][num_tiles * num_groups * TILE :],
        numbers_of[2][num_tiles * num_groups * TILE :],
    )
    scales, shifts = scratch[: num_blocks * TILE], scratch[num_blocks * TILE : 2 * num_blocks * TILE]
    sums = scratch[2 * num_blocks * TILE :]
    low, high = num_tiles * thread // threads, num_tiles * (thread + 1) // threads
    for begin in range(0, num_rows, ROW_BLOCK):
        end = min(num_rows, begin + ROW_BLOCK)
        for tile in range(low, high):
            widen_tile(dtype, numbers_of, tile, num_groups, blocks_per_group, scales)
            if has_shift:
                widen_tile(dtype, shifts_of, tile, num_groups, blocks_per_group, shifts)
            column = tile * TILE
            width = min(TILE, num_out - column)
            row = begin
            while row < end:
                count = 4 if MOST_ROWS == 4 and end - row >= 4 else 2 if end - row >= 2 else 1
                dot_rows(kind, size, codes, tile * tile_bytes, scales, rounded, row, count, row_scales, row_sums, sums)
                for r in range(count):
                    line = sums[r * TILE : (r + 1) * TILE]
                    if has_shift:
                        for block in range(num_blocks):
                            at = (row + r) * num_blocks + block
                            total = row_scales[at] * np.float32(row_sums[at] // -middle)
                            own = shifts[block * TILE : (block + 1) * TILE]
                            for i in range(TILE):
                                line[i] += total * own[i]
                    target = out[row + r, column : column + width]
                    for i in range(width):
                        target[i] = line[i]
                row += count


round_row = njit(cache=True, fastmath=FAST_MATH)(_round_row)
dot_rows = njit(_dot_rows)
