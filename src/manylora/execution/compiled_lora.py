"""LoRA for rows that decode, compiled: all adapters of a step in one call per group, straight from the pages.

With a row or two per adapter the arithmetic is nothing and reading the weights is everything. A loop of
torch products reads them with one core; here every thread takes its own part of every matrix::

    shrink   thread t computes rank rows  [R t/n, R (t+1)/n)  of each adapter's A stack
    barrier
    expand   thread t adds output columns [N t/n, N (t+1)/n)  of each module

so the load is even however ranks differ, and no two threads write the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from manylora.execution.compiled_team import FAST_MATH, Team, barrier, compile_kernel, num_threads, thread_num
from manylora.execution.resident import GroupWeights

__all__ = ["LoraTables", "apply_compiled", "lora_kernel", "make_tables"]

# Columns of a table's rows: which rows of the batch, where the piece lies, what it is a piece of.
FIRST_ROW, NUM_ROWS, OFFSET, PIECE_ROWS, PIECE_COLS, RANK_ROW, COLUMN, WHOLE, WHOLE_START, NUM_FIELDS = range(10)


@dataclass(frozen=True, slots=True)
class LoraTables:
    """A group's pieces over a step, as the kernel reads them.

    Args:
        shrink: Pieces of A stacks ``[n, NUM_FIELDS]``; WHOLE is the stack's rank.
        expand: Pieces of B^T ``[n, NUM_FIELDS]``; WHOLE columns from WHOLE_START on are the module's.
        max_rank: Largest rank of a stack.
    """

    shrink: np.ndarray
    expand: np.ndarray
    max_rank: int


def make_tables(parts: list[tuple[int, int, GroupWeights]]) -> LoraTables:
    """Write the pieces of ``parts`` (``(start, stop, weights)``) down."""
    shrink: list[tuple[int, ...]] = []
    expand: list[tuple[int, ...]] = []
    for start, stop, weights in parts:
        rows = (start, stop - start)
        # By column: the first piece of a row starts its sum, the others add to it.
        for piece in sorted(weights.a, key=lambda piece: piece.col):
            place = (piece.weight.storage_offset(), *piece.weight.shape, piece.row, piece.col)
            shrink.append((*rows, *place, weights.rank, 0))
        for module in weights.modules:
            width = max(piece.col + piece.weight.shape[1] for piece in module.b)
            for piece in module.b:
                place = (piece.weight.storage_offset(), *piece.weight.shape, module.row + piece.row)
                expand.append((*rows, *place, module.offset + piece.col, width, module.offset))
    return LoraTables(
        np.array(shrink, dtype=np.int64),
        np.array(expand, dtype=np.int64),
        max(weights.rank for _, _, weights in parts),
    )


def apply_compiled(team: Team, x: torch.Tensor, out: torch.Tensor, pages: torch.Tensor, tables: LoraTables) -> None:
    """Add LoRA of all pieces in ``tables`` into ``out``.

    Args:
        team: The threads.
        x: Inputs ``[rows, in]``, float32, contiguous.
        out: Outputs ``[rows, out]``, float32, contiguous, added into.
        pages: The storage the offsets count in, float32.
        tables: The pieces.
    """
    scratch = torch.empty(x.shape[0], tables.max_rank)
    sizes = np.array(
        [len(tables.shrink), len(tables.expand), x.shape[0], x.shape[1], out.shape[1], tables.max_rank, pages.numel()],
        dtype=np.int64,
    )
    team.run(lora_kernel(), sizes, x, out, pages, tables.shrink, tables.expand, scratch)


def _shrink(thread: Any, num_threads: Any, table: Any, x: Any, pages: Any, scratch: Any) -> None:
    for n in range(table.shape[0]):
        rank = table[n, WHOLE]
        row, num_cols, col = table[n, RANK_ROW], table[n, PIECE_COLS], table[n, COLUMN]
        first = max(rank * thread // num_threads - row, 0)
        last = min(rank * (thread + 1) // num_threads - row, table[n, PIECE_ROWS])
        for r in range(first, last):
            offset = table[n, OFFSET] + r * num_cols
            weight = pages[offset : offset + num_cols]
            for i in range(table[n, FIRST_ROW], table[n, FIRST_ROW] + table[n, NUM_ROWS]):
                vector = x[i, col : col + num_cols]
                total = np.float32(0.0)
                for c in range(num_cols):
                    total += weight[c] * vector[c]
                if col == 0:
                    scratch[i, row + r] = total
                else:
                    scratch[i, row + r] += total


def _expand(thread: Any, num_threads: Any, table: Any, out: Any, pages: Any, scratch: Any) -> None:
    for n in range(table.shape[0]):
        whole, start, num_cols = table[n, WHOLE], table[n, WHOLE_START], table[n, PIECE_COLS]
        column = table[n, COLUMN]
        first = max(start + whole * thread // num_threads - column, 0)
        last = min(start + whole * (thread + 1) // num_threads - column, num_cols)
        if first >= last:
            continue
        for r in range(table[n, PIECE_ROWS]):
            offset = table[n, OFFSET] + r * num_cols
            weight = pages[offset + first : offset + last]
            for i in range(table[n, FIRST_ROW], table[n, FIRST_ROW] + table[n, NUM_ROWS]):
                target = out[i, column + first : column + last]
                factor = scratch[i, table[n, RANK_ROW] + r]
                for c in range(last - first):
                    target[c] += factor * weight[c]


def _lora(thread: Any, num_threads: Any, pointers: Any) -> None:
    sizes = carray(pointers[0], 7, np.int64)
    x = carray(pointers[1], (sizes[2], sizes[3]), np.float32)
    out = carray(pointers[2], (sizes[2], sizes[4]), np.float32)
    pages = carray(pointers[3], sizes[6], np.float32)
    shrink_table = carray(pointers[4], (sizes[0], NUM_FIELDS), np.int64)
    expand_table = carray(pointers[5], (sizes[1], NUM_FIELDS), np.int64)
    scratch = carray(pointers[6], (sizes[2], sizes[5]), np.float32)
    shrink(thread, num_threads, shrink_table, x, pages, scratch)
    barrier()
    expand(thread, num_threads, expand_table, out, pages, scratch)


shrink = njit(cache=True, fastmath=FAST_MATH)(_shrink)
expand = njit(cache=True, fastmath=FAST_MATH)(_expand)
lora = njit(cache=True)(_lora)


def _entry(pointers: Any) -> None:
    lora(thread_num(), num_threads(), pointers)


@cache
def lora_kernel() -> int:
    """Return the kernel's address; compiles it when first called."""
    return compile_kernel(_entry)
