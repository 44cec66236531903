"""LoRA for rows that decode, compiled: all adapters of a step in one call per group, straight from the pages.

With a row or two per adapter the arithmetic is nothing and reading the weights is everything. A loop of
torch products reads them with one core; here all threads do. The work of all adapters is laid end to end and cut
into equal shares, so that each thread reads one long run of memory, the load is even however ranks differ, and no
two threads write the same number::

    shrink   | A rows of adapter 0     | 1 | A rows of adapter 2       |      thread t computes rank rows
             |----- thread 0 -----|----- thread 1 -----|
    barrier
    expand   | q  | k | v of adapter 0 | 1 | q     | k | v of 2        |      thread t adds output columns
             |----- thread 0 -----|----- thread 1 -----|

Rows of a matrix are read one after another, never side by side: a processor fetches ahead along one stream at twice
the speed that it does along four. Weights of 16 bits are widened in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from manylora.execution.compiled_numbers import as_float32
from manylora.execution.compiled_tables import (
    BEGIN,
    COLUMN,
    COST,
    DTYPE,
    FIRST_ROW,
    NUM_FIELDS,
    NUM_ROWS,
    OFFSET,
    PIECE_COLS,
    PIECE_ROWS,
    RANK_ROW,
    START,
    UNIT,
    Table,
    group_table,
    share,
)
from manylora.execution.compiled_team import FAST_MATH, Team, barrier, compile_kernel, num_threads, thread_num
from manylora.execution.resident import GroupWeights

__all__ = ["LoraTables", "apply_compiled", "lora_kernel", "make_tables"]


@dataclass(frozen=True, slots=True)
class LoraTables:
    """A group's pieces over a step, as the kernel reads them.

    Args:
        shrink: Pieces of A stacks ``[n, NUM_FIELDS]``.
        expand: Pieces of B^T ``[n, NUM_FIELDS]``; the module's columns begin at BEGIN.
        shrink_cost: Length of the line that the stacks make.
        expand_cost: Length of the line that the modules make.
        max_rank: Largest rank of a stack.
    """

    shrink: Table
    expand: Table
    shrink_cost: int
    expand_cost: int
    max_rank: int


def make_tables(parts: list[tuple[int, int, GroupWeights]]) -> LoraTables:
    """Write the pieces of ``parts`` (``(start, stop, weights)``) down."""
    tables = [group_table(weights) for _, _, weights in parts]
    first_row = np.array([start for start, _, _ in parts])
    num_rows = np.array([stop - start for start, stop, _ in parts])
    # Reading is what counts; a row's arithmetic is about what reading a byte per weight would be.
    cost = np.array([table.element_bytes for table in tables]) + num_rows
    shrink_costs = cost * np.array([weights.rank for _, _, weights in parts])
    expand_costs = cost * np.array([table.expand_cost for table in tables])

    def join(pieces: list[Table], costs: Table) -> Table:
        table = np.concatenate(pieces)
        counts = [len(piece) for piece in pieces]
        table[:, FIRST_ROW] = np.repeat(first_row, counts)
        table[:, NUM_ROWS] = np.repeat(num_rows, counts)
        table[:, START:NUM_FIELDS] *= np.repeat(cost, counts)[:, None]
        table[:, START] += np.repeat(np.cumsum(costs) - costs, counts)
        return table

    return LoraTables(
        join([table.shrink for table in tables], shrink_costs),
        join([table.expand for table in tables], expand_costs),
        int(shrink_costs.sum()),
        int(expand_costs.sum()),
        max(weights.rank for _, _, weights in parts),
    )


def apply_compiled(team: Team, x: torch.Tensor, out: torch.Tensor, pages: torch.Tensor, tables: LoraTables) -> None:
    """Add LoRA of all pieces in ``tables`` into ``out``.

    Args:
        team: The threads.
        x: Inputs ``[rows, in]``, float32, contiguous.
        out: Outputs ``[rows, out]``, float32, contiguous, added into.
        pages: The whole storage the offsets count in (each in elements of its piece's type).
        tables: The pieces.
    """
    scratch = torch.empty(x.shape[0], tables.max_rank)
    lengths = [len(tables.shrink), len(tables.expand), tables.shrink_cost, tables.expand_cost]
    sizes = np.array([*lengths, *x.shape, out.shape[1], tables.max_rank, pages.nbytes], dtype=np.int64)
    team.run(lora_kernel(), sizes, x, out, pages, tables.shrink, tables.expand, scratch)


def _dot(weights: Any, vector: Any) -> Any:
    total = np.float32(0.0)
    for c in range(vector.shape[0]):
        total += as_float32(weights[c]) * vector[c]
    return total


def _add(weights: Any, factor: Any, target: Any) -> None:
    for c in range(target.shape[0]):
        target[c] += factor * as_float32(weights[c])


def _shrink_piece(entry: Any, first: int, last: int, x: Any, pages: Any, scratch: Any) -> None:
    num_cols, col, row = entry[PIECE_COLS], entry[COLUMN], entry[RANK_ROW]
    for r in range(first, last):
        offset = entry[OFFSET] + r * num_cols
        weights = pages[offset : offset + num_cols]
        for i in range(entry[FIRST_ROW], entry[FIRST_ROW] + entry[NUM_ROWS]):
            total = dot(weights, x[i, col : col + num_cols])
            if col == 0:
                scratch[i, row + r] = total
            else:
                scratch[i, row + r] += total


def _expand_piece(entry: Any, first: int, last: int, out: Any, pages: Any, scratch: Any) -> None:
    num_cols, column = entry[PIECE_COLS], entry[COLUMN]
    for r in range(entry[PIECE_ROWS]):
        offset = entry[OFFSET] + r * num_cols
        weights = pages[offset + first : offset + last]
        for i in range(entry[FIRST_ROW], entry[FIRST_ROW] + entry[NUM_ROWS]):
            add(weights, scratch[i, entry[RANK_ROW] + r], out[i, column + first : column + last])


def _lora(thread: Any, num_threads: Any, pointers: Any) -> None:
    sizes = carray(pointers[0], 9, np.int64)
    x = carray(pointers[1], (sizes[4], sizes[5]), np.float32)
    out = carray(pointers[2], (sizes[4], sizes[6]), np.float32)
    # The same memory three times: the type says how a number is widened (int16 holds the bits of float16).
    float32, bfloat16, float16 = (
        carray(pointers[3], sizes[8] // 4, np.float32),
        carray(pointers[3], sizes[8] // 2, np.uint16),
        carray(pointers[3], sizes[8] // 2, np.int16),
    )
    shrink = carray(pointers[4], (sizes[0], NUM_FIELDS), np.int64)
    expand = carray(pointers[5], (sizes[1], NUM_FIELDS), np.int64)
    scratch = carray(pointers[6], (sizes[4], sizes[7]), np.float32)
    for n in range(sizes[0]):
        entry = shrink[n]
        first, last = share(thread, num_threads, sizes[2], entry[START], entry[COST])
        first, last = max(first - entry[RANK_ROW], 0), min(last - entry[RANK_ROW], entry[PIECE_ROWS])
        if first < last:
            if entry[DTYPE] == 0:
                shrink_piece(entry, first, last, x, float32, scratch)
            elif entry[DTYPE] == 1:
                shrink_piece(entry, first, last, x, bfloat16, scratch)
            else:
                shrink_piece(entry, first, last, x, float16, scratch)
    barrier()
    for n in range(sizes[1]):
        entry = expand[n]
        first, last = share(thread, num_threads, sizes[3], entry[START], entry[COST])
        before = entry[COLUMN] - entry[BEGIN]
        first, last = max(first * UNIT - before, 0), min(last * UNIT - before, entry[PIECE_COLS])
        if first < last:
            if entry[DTYPE] == 0:
                expand_piece(entry, first, last, out, float32, scratch)
            elif entry[DTYPE] == 1:
                expand_piece(entry, first, last, out, bfloat16, scratch)
            else:
                expand_piece(entry, first, last, out, float16, scratch)


dot = njit(cache=True, fastmath=FAST_MATH)(_dot)
add = njit(cache=True, fastmath=FAST_MATH)(_add)
shrink_piece = njit(cache=True)(_shrink_piece)
expand_piece = njit(cache=True)(_expand_piece)
lora = njit(cache=True)(_lora)


def _entry(pointers: Any) -> None:
    lora(thread_num(), num_threads(), pointers)


@cache
def lora_kernel() -> int:
    """Return the kernel's address; compiles it when first called."""
    return compile_kernel(_entry)
