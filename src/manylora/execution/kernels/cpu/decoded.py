"""Products in float32 with weights that are kept in 16, 8 or 4 bits: widened tile by tile, exactly, then multiplied.

A thread widens ``CHUNK`` inputs of a tile's outputs into its first-level cache and multiplies them by every row before
it goes on. So weights come from memory in their short form, once for any number of rows up to ``ROW_BLOCK``, and a
row's result is the same to the bit whatever rows are beside it.

It is the product of weights whose activations must not be rounded, of numbers that are no steps of equal size (16-bit
and 8-bit floating point, tables of 16 numbers), and of processors for which ``coded`` has no quick instruction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from manylora.execution.kernels.cpu.forms import BFLOAT16, BLOCK, FLOAT16, INT4, NUM_SIZES, TABLE4, TILE, NarrowForm
from manylora.execution.kernels.cpu.loops import WIDE_ROWS, WIDE_WIDTH, wide_row, wide_tile
from manylora.execution.kernels.cpu.openmp import Team, compile_kernel, num_threads, thread_num
from manylora.execution.kernels.cpu.widening import CHUNK, widen_block, widen_tile

__all__ = ["decoded_loop", "multiply_decoded"]

ROW_BLOCK = 64  # rows whose activations stay in a second-level cache while a tile passes


def multiply_decoded(
    team: Team, x: torch.Tensor, address: int, form: NarrowForm, table: NDArray[np.float32]
) -> torch.Tensor:
    """Return ``x W^T``, ``[rows, out]``, for ``x`` ``[rows, in]``, float32 and contiguous, and weights at ``address``.

    ``table`` ``[16]``, float32, are the numbers of ``table4``.
    """
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, form.num_out)
    num_blocks = -(-form.num_in // form.block)
    scratch = torch.empty(torch.get_num_threads(), (2 * num_blocks + CHUNK + ROW_BLOCK) * TILE)
    team.run(compile_kernel(decoded_loop), form.sizes(num_rows), x, address, table, scratch, out)
    return out


def decoded_loop(pointers: Any) -> None:
    """Multiply in one thread of a team; ``pointers`` as ``multiply_decoded`` passes them."""
    thread, threads = thread_num(), num_threads()
    num_rows, num_in, num_out, kind, size, blocks_per_group, dtype, has_shift = carray(pointers[0], NUM_SIZES, np.int64)
    num_blocks, num_tiles = -(-num_in // size), -(-num_out // TILE)
    bits = 4 if kind in (INT4, TABLE4) else 16 if kind in (BFLOAT16, FLOAT16) else 8
    tile_words = -(-num_in // BLOCK) * BLOCK * TILE * bits // 32
    has_scale = blocks_per_group > 0
    num_groups = -(-num_blocks // blocks_per_group) if has_scale else 0
    count = num_tiles * num_groups * TILE
    x = carray(pointers[1], num_rows * num_in, np.float32)
    words = carray(pointers[2], num_tiles * tile_words + 2 * count, np.uint32)
    table = carray(pointers[3], 16, np.float32)
    length = (2 * num_blocks + CHUNK + ROW_BLOCK) * TILE
    scratch = carray(pointers[4], (threads, length), np.float32)[thread]
    out = carray(pointers[5], (num_rows, num_out), np.float32)
    behind = words[num_tiles * tile_words :]
    numbers_of = (behind.view(np.float32), behind.view(np.uint16), behind.view(np.int16))
    shifts_of = (numbers_of[0][count:], numbers_of[1][count:], numbers_of[2][count:])
    scales, shifts = scratch[: num_blocks * TILE], scratch[num_blocks * TILE : 2 * num_blocks * TILE]
    panel = scratch[2 * num_blocks * TILE : (2 * num_blocks + CHUNK) * TILE]
    sums = scratch[(2 * num_blocks + CHUNK) * TILE :]
    if not has_scale:
        scales[:] = np.float32(1.0)
    low, high = num_tiles * thread // threads, num_tiles * (thread + 1) // threads
    for begin in range(0, num_rows, ROW_BLOCK):
        rows = min(ROW_BLOCK, num_rows - begin)
        for tile in range(low, high):
            if has_scale:
                widen_tile(dtype, numbers_of, tile, num_groups, blocks_per_group, scales)
            if has_shift:
                widen_tile(dtype, shifts_of, tile, num_groups, blocks_per_group, shifts)
            sums[: rows * TILE] = np.float32(0.0)
            for first in range(0, num_blocks, CHUNK // size):
                last = min(num_blocks, first + CHUNK // size)
                for block in range(first, last):
                    line = slice(block * TILE, (block + 1) * TILE)
                    at = tile * tile_words + block * (size * TILE * bits // 32)
                    place = panel[(block - first) * size * WIDE_WIDTH :]
                    widen_block(kind, has_shift != 0, words, at, size, scales[line], shifts[line], table, place)
                column = first * size
                count_in = min(num_in, last * size) - column
                for part in range(TILE // WIDE_WIDTH):
                    at, own = part * CHUNK * WIDE_WIDTH, part * WIDE_WIDTH
                    row = 0
                    while row + WIDE_ROWS <= rows:
                        start = (begin + row) * num_in + column
                        wide_tile(x, start, num_in, panel, at, count_in, sums, row * TILE + own, TILE)
                        row += WIDE_ROWS
                    while row < rows:
                        start = (begin + row) * num_in + column
                        wide_row(x, start, num_in, panel, at, count_in, sums, row * TILE + own, TILE)
                        row += 1
            column = tile * TILE
            width = min(TILE, num_out - column)
            for row in range(rows):
                target = out[begin + row, column : column + width]
                for i in range(width):
                    target[i] = sums[row * TILE + i]
