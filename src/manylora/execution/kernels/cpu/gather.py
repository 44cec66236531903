"""Compiled LoRA of an embedding, on one thread: A ``[rank, vocab]`` is gathered at the tokens, then multiplied by B^T.

The tables and arguments are those of ``lora``, with token ids ``[rows, 1]``, int64, in the place of inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit

from manylora.execution.kernels.cpu.lora import expand_piece
from manylora.execution.kernels.cpu.openmp import compile_kernel
from manylora.execution.kernels.cpu.tables import (
    COLUMN,
    DTYPE,
    FIRST_ROW,
    NUM_FIELDS,
    NUM_ROWS,
    OFFSET,
    PIECE_COLS,
    PIECE_ROWS,
    RANK_ROW,
)
from manylora.execution.kernels.cpu.vectors import as_float32

__all__ = ["gather_kernel"]


def _gather_piece(entry: Any, tokens: Any, pages: Any, scratch: Any, pitch: int) -> None:
    for i in range(entry[FIRST_ROW], entry[FIRST_ROW] + entry[NUM_ROWS]):
        column = tokens[i] - entry[COLUMN]
        if 0 <= column < entry[PIECE_COLS]:
            for r in range(entry[PIECE_ROWS]):
                weight = pages[entry[OFFSET] + r * entry[PIECE_COLS] + column]
                scratch[i * pitch + entry[RANK_ROW] + r] = as_float32(weight)


def _gather(pointers: Any) -> None:
    sizes = carray(pointers[0], 9, np.int64)
    tokens = carray(pointers[1], sizes[4], np.int64)
    out = carray(pointers[2], sizes[4] * sizes[6], np.float32)
    # The same memory three times, as in ``lora``.
    float32, bfloat16, float16 = (
        carray(pointers[3], sizes[8] // 4, np.float32),
        carray(pointers[3], sizes[8] // 2, np.uint16),
        carray(pointers[3], sizes[8] // 2, np.int16),
    )
    shrink = carray(pointers[4], (sizes[0], NUM_FIELDS), np.int64)
    expand = carray(pointers[5], (sizes[1], NUM_FIELDS), np.int64)
    scratch = carray(pointers[6], sizes[4] * sizes[7], np.float32)
    scratch[:] = np.float32(0.0)
    for n in range(sizes[0]):
        entry = shrink[n]
        if entry[DTYPE] == 0:
            gather_piece(entry, tokens, float32, scratch, sizes[7])
        elif entry[DTYPE] == 1:
            gather_piece(entry, tokens, bfloat16, scratch, sizes[7])
        else:
            gather_piece(entry, tokens, float16, scratch, sizes[7])
    for n in range(sizes[1]):
        entry = expand[n]
        last, ahead = entry[PIECE_COLS], entry[OFFSET]
        if entry[DTYPE] == 0:
            expand_piece(entry, 0, last, ahead, out, sizes[6], float32, scratch, sizes[7])
        elif entry[DTYPE] == 1:
            expand_piece(entry, 0, last, ahead, out, sizes[6], bfloat16, scratch, sizes[7])
        else:
            expand_piece(entry, 0, last, ahead, out, sizes[6], float16, scratch, sizes[7])


gather_piece = njit(cache=True)(_gather_piece)


@cache
def gather_kernel() -> int:
    """Return the kernel's address; the first call compiles it."""
    return compile_kernel(_gather)
