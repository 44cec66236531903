"""Compiled LoRA for decoding rows: all adapters of a step in one call per group, straight from the pages.

With a row or two per adapter, the cost is reading the weights. A loop of torch products reads them with one core; here
all threads do. The work of all adapters is laid end to end and cut into equal shares: each thread reads one long run of
memory, the load is even whatever the ranks, and no two threads write the same number::

    shrink   | A rows of adapter 0     | 1 | A rows of adapter 2       |      thread t computes rank rows
             |----- thread 0 -----|----- thread 1 -----|
    barrier
    expand   | q  | k | v of adapter 0 | 1 | q     | k | v of 2        |      thread t adds output columns
             |----- thread 0 -----|----- thread 1 -----|

Rows of a matrix are read one after another, never side by side: a processor prefetches one stream at twice the speed of
four. The weights two rows further on, in this piece or the next, are prefetched (``loops``). Weights of 16 bits are
widened in registers.

Factors and shifts (``vectors``) follow in a call of their own, in which each thread has some columns of all rows.

LoRA of an embedding (``gather``) is small and runs on one thread: A ``[rank, vocab]`` is gathered at the tokens, then
multiplied by B^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from manylora.execution.kernels.cpu.loops import GROUP, stream_add, stream_adds, stream_dot, stream_dots
from manylora.execution.kernels.cpu.openmp import FAST_MATH, Arguments, barrier, compile_kernel, num_threads, thread_num
from manylora.execution.kernels.cpu.tables import (
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
    RANK,
    RANK_ROW,
    START,
    UNIT,
    MemorySpan,
    StepPieces,
    Table,
    share,
)
from manylora.execution.kernels.cpu.vectors import LANES, as_float32, by_type, typed_views
from manylora.execution.storage.resident import AdapterRows

__all__ = [
    "LoraTables",
    "VectorTables",
    "gather_kernel",
    "lora_arguments",
    "lora_kernel",
    "make_tables",
    "make_vectors",
    "vector_arguments",
    "vector_kernel",
]

# Distance of the prefetch, in rows of weights.
AHEAD = 2


@dataclass(frozen=True, slots=True)
class LoraTables:
    """A group's pieces over a step: ``shrink`` of A stacks, ``expand`` of B^T, each ``[n, NUM_FIELDS]``.

    Offsets count from ``memory``, in elements of the piece's type.
    """

    shrink: Table
    expand: Table
    shrink_cost: int
    expand_cost: int
    max_rank: int
    memory: MemorySpan


def make_tables(
    rows: Sequence[AdapterRows], groups: Sequence[str], experts: Sequence[int] = ()
) -> dict[str, LoraTables]:
    """Return the tables of each group that any adapter of ``rows`` changes; arguments as for ``StepPieces``."""
    step = StepPieces(rows, groups, experts)
    shrink, expand = step.shrink(), step.expand()
    max_ranks = step.directory[:, :, RANK].max(axis=0).tolist()
    return {
        group: LoraTables(
            shrink.of_group(number),
            expand.of_group(number),
            shrink.costs[number],
            expand.costs[number],
            max_ranks[number],
            step.memory,
        )
        for number, group in enumerate(groups)
        if max_ranks[number]
    }


def lora_arguments(x: torch.Tensor, out: torch.Tensor, tables: LoraTables) -> Arguments:
    """Return the arguments to add LoRA of all pieces in ``tables`` into ``out``.

    Inputs ``x`` ``[rows, in]`` and outputs ``[rows, out]`` are float32 and contiguous. Offsets in the tables count
    elements of the piece's type.
    """
    scratch = torch.empty(x.shape[0], tables.max_rank)
    lengths = [len(tables.shrink), len(tables.expand), tables.shrink_cost, tables.expand_cost]
    sizes = np.array([*lengths, *x.shape, out.shape[1], tables.max_rank, tables.memory.num_bytes], dtype=np.int64)
    return sizes, x, out, tables.memory.address, tables.shrink, tables.expand, scratch


@dataclass(frozen=True, slots=True)
class VectorTables:
    """A group's factors and shifts over a step."""

    vectors: Table  # ``[n, NUM_FIELDS]``, offsets as in ``LoraTables``
    memory: MemorySpan


def make_vectors(rows: Sequence[AdapterRows], groups: Sequence[str]) -> dict[str, VectorTables]:
    """Return the vectors of each group in which any adapter of ``rows`` has one."""
    step = StepPieces(rows, groups)
    pieces = step.vectors()
    tables = {group: pieces.of_group(number) for number, group in enumerate(groups)}
    return {group: VectorTables(table, step.memory) for group, table in tables.items() if len(table)}


def vector_arguments(out: torch.Tensor, tables: VectorTables) -> Arguments:
    """Return the arguments to multiply and shift rows of ``out`` ``[rows, out]``, float32 and contiguous."""
    memory = tables.memory
    sizes = np.array([len(tables.vectors), *out.shape, memory.num_bytes], dtype=np.int64)
    return sizes, out, memory.address, tables.vectors


def _rest(weights: Any, at: int, x: Any, x_at: int, number: int) -> Any:
    """Return the product of the last numbers of a row, which do not fill a run."""
    total = np.float32(0.0)
    for c in range(number):
        total += as_float32(weights[at + c]) * x[x_at + c]
    return total


def _add_rest(weights: Any, at: int, factor: Any, out: Any, out_at: int, number: int) -> None:
    for c in range(number):
        out[out_at + c] += factor * as_float32(weights[at + c])


def _shrink_piece(
    pages: Any, entry: Any, first: int, last: int, ahead: int, x: Any, width: int, scratch: Any, pitch: int
) -> None:
    num_cols, col = entry[PIECE_COLS], entry[COLUMN]
    even, odd = num_cols - num_cols % LANES, num_cols % LANES
    first_row, stop = entry[FIRST_ROW], entry[FIRST_ROW] + entry[NUM_ROWS]
    for r in range(first, last):
        at = entry[OFFSET] + r * num_cols
        coming = at + AHEAD * num_cols if r + AHEAD < last else ahead + (r + AHEAD - last) * num_cols
        if col == 0:
            for i in range(first_row, stop):
                scratch[i * pitch + entry[RANK_ROW] + r] = np.float32(0.0)
        grouped = stop - entry[NUM_ROWS] % GROUP
        for i in range(first_row, grouped, GROUP):
            totals = stream_dots(pages, at, coming, x, i * width + col, width, even)
            for j in range(GROUP):
                scratch[(i + j) * pitch + entry[RANK_ROW] + r] += totals[j]
            coming = at
        for i in range(grouped, stop):
            totals = stream_dot(pages, at, coming, x, i * width + col, width, even)
            scratch[i * pitch + entry[RANK_ROW] + r] += totals[0]
            coming = at
        if odd:
            for i in range(first_row, stop):
                total = rest(pages, at + even, x, i * width + col + even, odd)
                scratch[i * pitch + entry[RANK_ROW] + r] += total


def _expand_piece(
    pages: Any, entry: Any, first: int, last: int, ahead: int, out: Any, width: int, scratch: Any, pitch: int
) -> None:
    num_rows, num_cols, column = entry[PIECE_ROWS], entry[PIECE_COLS], entry[COLUMN] + first
    even, odd = (last - first) - (last - first) % LANES, (last - first) % LANES
    first_row, stop = entry[FIRST_ROW], entry[FIRST_ROW] + entry[NUM_ROWS]
    for r in range(num_rows):
        at = entry[OFFSET] + r * num_cols + first
        coming = at + AHEAD * num_cols if r + AHEAD < num_rows else ahead + (r + AHEAD - num_rows) * num_cols
        grouped = stop - entry[NUM_ROWS] % GROUP
        for i in range(first_row, grouped, GROUP):
            factors = i * pitch + entry[RANK_ROW] + r
            stream_adds(pages, at, coming, scratch, factors, pitch, out, i * width + column, width, even)
            coming = at
        for i in range(grouped, stop):
            factors = i * pitch + entry[RANK_ROW] + r
            stream_add(pages, at, coming, scratch, factors, pitch, out, i * width + column, width, even)
            coming = at
        if odd:
            for i in range(first_row, stop):
                factor = scratch[i * pitch + entry[RANK_ROW] + r]
                add_rest(pages, at + even, factor, out, i * width + column + even, odd)


def _rank_rows(thread: int, num_threads: int, total: int, entry: Any) -> tuple[int, int]:
    """Return the thread's rows of a piece of A."""
    first, last = share(thread, num_threads, total, entry[START], entry[COST])
    return max(first - entry[RANK_ROW], 0), min(last - entry[RANK_ROW], entry[PIECE_ROWS])


def _columns(thread: int, num_threads: int, total: int, entry: Any) -> tuple[int, int]:
    """Return the thread's columns of a piece of B^T."""
    first, last = share(thread, num_threads, total, entry[START], entry[COST])
    before = entry[COLUMN] - entry[BEGIN]
    return max(first * UNIT - before, 0), min(last * UNIT - before, entry[PIECE_COLS])


def _place(entry: Any, number: int, dtype: int) -> Any:
    """Return the offset of element ``number`` of a piece, in elements of another piece's type."""
    at = entry[OFFSET] + number
    if entry[DTYPE] == 0 and dtype != 0:
        return at * 2
    return at // 2 if entry[DTYPE] != 0 and dtype == 0 else at


def _lora(pointers: Any) -> None:
    thread, threads = thread_num(), num_threads()
    sizes = carray(pointers[0], 9, np.int64)
    x = carray(pointers[1], sizes[4] * sizes[5], np.float32)
    out = carray(pointers[2], sizes[4] * sizes[6], np.float32)
    pages = typed_views(pointers[3], sizes[8])
    shrink = carray(pointers[4], (sizes[0], NUM_FIELDS), np.int64)
    expand = carray(pointers[5], (sizes[1], NUM_FIELDS), np.int64)
    scratch = carray(pointers[6], sizes[4] * sizes[7], np.float32)
    for n in range(sizes[0]):
        entry, after = shrink[n], shrink[min(n + 1, sizes[0] - 1)]
        first, last = rank_rows(thread, threads, sizes[2], entry)
        if first < last:
            ahead = place(after, rank_rows(thread, threads, sizes[2], after)[0] * after[PIECE_COLS], entry[DTYPE])
            shrink_piece(entry[DTYPE], pages, entry, first, last, ahead, x, sizes[5], scratch, sizes[7])
    barrier()
    for n in range(sizes[1]):
        entry, after = expand[n], expand[min(n + 1, sizes[1] - 1)]
        first, last = columns(thread, threads, sizes[3], entry)
        if first < last:
            ahead = place(after, columns(thread, threads, sizes[3], after)[0], entry[DTYPE])
            expand_piece(entry[DTYPE], pages, entry, first, last, ahead, out, sizes[6], scratch, sizes[7])


def _gather_piece(pages: Any, entry: Any, tokens: Any, scratch: Any, pitch: int) -> None:
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
    pages = typed_views(pointers[3], sizes[8])
    shrink = carray(pointers[4], (sizes[0], NUM_FIELDS), np.int64)
    expand = carray(pointers[5], (sizes[1], NUM_FIELDS), np.int64)
    scratch = carray(pointers[6], sizes[4] * sizes[7], np.float32)
    scratch[:] = np.float32(0.0)
    for n in range(sizes[0]):
        entry = shrink[n]
        gather_piece(entry[DTYPE], pages, entry, tokens, scratch, sizes[7])
    for n in range(sizes[1]):
        entry = expand[n]
        last, ahead = entry[PIECE_COLS], entry[OFFSET]
        expand_piece(entry[DTYPE], pages, entry, 0, last, ahead, out, sizes[6], scratch, sizes[7])


def _vectors(pointers: Any) -> None:
    thread, threads = thread_num(), num_threads()
    sizes = carray(pointers[0], 4, np.int64)
    width = sizes[2]
    out = carray(pointers[1], sizes[1] * width, np.float32)
    numbers = carray(pointers[2], sizes[3] // 4, np.float32)
    table = carray(pointers[3], (sizes[0], NUM_FIELDS), np.int64)
    low, high = width * thread // threads, width * (thread + 1) // threads
    for n in range(sizes[0]):
        entry = table[n]
        first, last = max(entry[COLUMN], low), min(entry[COLUMN] + entry[PIECE_COLS], high)
        at = (entry[OFFSET] if entry[DTYPE] == 0 else entry[OFFSET] // 2) + first - entry[COLUMN]
        if first < last:
            for i in range(entry[FIRST_ROW], entry[FIRST_ROW] + entry[NUM_ROWS]):
                row = out[i * width + first : i * width + last]
                if entry[RANK_ROW] == 0:
                    row *= numbers[at : at + last - first]
                else:
                    row += numbers[at : at + last - first]


rest = njit(cache=True, fastmath=FAST_MATH)(_rest)
add_rest = njit(cache=True, fastmath=FAST_MATH)(_add_rest)
rank_rows = njit(cache=True)(_rank_rows)
columns = njit(cache=True)(_columns)
place = njit(cache=True)(_place)
shrink_piece = by_type(njit(_shrink_piece))
expand_piece = by_type(njit(_expand_piece))
gather_piece = by_type(njit(_gather_piece))


@cache
def lora_kernel() -> int:
    """Return the kernel's address; the first call compiles it."""
    return compile_kernel(_lora)


@cache
def gather_kernel() -> int:
    """Return the address of the kernel for an embedding, whose inputs are token ids ``[rows, 1]``, int64."""
    return compile_kernel(_gather)


@cache
def vector_kernel() -> int:
    """Return the address of the kernel for factors and shifts."""
    return compile_kernel(_vectors)
