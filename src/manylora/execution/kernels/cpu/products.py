"""Compiled LoRA for prompts: with many rows per adapter, arithmetic is the cost.

A library's product is best when it is large. These are small: 128 rows, a rank of 8 to 128, and up to three per group
that add into a slice of the output. Here a group's adapters are one call. Threads share the rows by their arithmetic,
and each takes a block of rows from inputs to outputs, so that intermediate sums stay in its cache and threads never
wait for one another::

    rows     | adapter 0        | adapter 1, of a small rank          | adapter 2 |
             |------ thread 0 ------|--------------- thread 1 ---------------|
    block    x [rows, in]  ->  shrunk [rows, rank]  ->  out [rows, columns]

Weights go through a *panel*: a few rows of A, or some columns of B^T, copied close together, widened if they have 16
bits, and read by every row of the block (``loops``). Outputs are walked in runs of a kilobyte: they come from memory,
and a processor prefetches along a row but not from row to row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from manylora.execution.kernels.cpu.loops import (
    AXPY_ROWS,
    AXPY_WIDTH,
    DOT_RANKS,
    DOT_ROWS,
    axpy_row,
    axpy_tile,
    dot_row,
    dot_tile,
)
from manylora.execution.kernels.cpu.lora import (
    LoraTables,
    VectorTables,
    lora_arguments,
    lora_kernel,
    make_tables,
    make_vectors,
)
from manylora.execution.kernels.cpu.openmp import FAST_MATH, Arguments, compile_kernel, num_threads, thread_num
from manylora.execution.kernels.cpu.tables import (
    COLUMN,
    DTYPE,
    NUM_FIELDS,
    OFFSET,
    PIECE_COLS,
    PIECE_ROWS,
    RANK,
    RANK_ROW,
    SIZE,
    MemorySpan,
    StepPieces,
    Table,
    adapter_tables,
    before,
    share,
)
from manylora.execution.kernels.cpu.vectors import LANES, as_float32, by_type, typed_views
from manylora.execution.storage.resident import AdapterRows

__all__ = [
    "MAX_READ_ROWS",
    "GroupTables",
    "make_group_tables",
    "make_product_tables",
    "product_arguments",
    "product_kernel",
]

# Columns of a part's line: rows of the batch; pieces of A and of B^T; its start among all work, and the work of
# AXPY_ROWS of its rows.
FIRST, ROWS, FIRST_A, LAST_A, FIRST_B, LAST_B, BEGIN, COST, NUM_PART_FIELDS = range(9)

MAX_READ_ROWS = 8  # up to this many rows, reading the weights row by row (``lora``) is faster than tiles of a product

# Rows that go from input to output together: their inputs stay in a second-level cache while A is read.
BLOCK_ROWS = 128

# Columns of A in a panel: DOT_RANKS rows of them leave space in a first-level cache for as many of x.
SHRINK_COLS = 768

# Columns of B^T in a panel.
EXPAND_COLS = 256


@dataclass(frozen=True, slots=True)
class ProductTables:
    """The work that adapters add to one group of modules in the prompts of a step."""

    parts: Table  # a line for each adapter: its rows of the batch, its lines in the other tables, its work
    shrink: Table  # a line for each piece of A, as in ``LoraTables``
    expand: Table  # a line for each piece of B^T, as in ``LoraTables``
    cost: int  # the sum of all work, by which threads divide it
    max_rank: int  # the largest rank of an adapter of the step
    memory: MemorySpan  # the memory that offsets in ``shrink`` and ``expand`` count from


def make_product_tables(
    rows: Sequence[AdapterRows], groups: Sequence[str], experts: Sequence[int] = ()
) -> dict[str, ProductTables]:
    """Return the tables of each group that any adapter of ``rows`` changes; arguments as for ``StepPieces``."""
    step = StepPieces(rows, groups, experts)
    shrink, expand = step.shrink(), step.expand()
    sizes, num_rows = step.directory[:, :, SIZE], step.rows[:, 1]
    work = sizes * -(-num_rows // AXPY_ROWS)[:, None]
    lines = np.empty((*sizes.shape, NUM_PART_FIELDS), dtype=np.int64)
    lines[..., FIRST], lines[..., ROWS] = step.rows[:, 0, None], num_rows[:, None]
    lines[..., FIRST_A], lines[..., FIRST_B] = before(shrink.counts), before(expand.counts)
    lines[..., LAST_A] = lines[..., FIRST_A] + shrink.counts
    lines[..., LAST_B] = lines[..., FIRST_B] + expand.counts
    lines[..., BEGIN], lines[..., COST] = before(work), sizes
    ranks = step.directory[:, :, RANK]
    has_weights = ranks > 0
    totals, max_ranks = work.sum(axis=0).tolist(), ranks.max(axis=0).tolist()
    return {
        group: ProductTables(
            lines[has_weights[:, number], number],
            shrink.of_group(number),
            expand.of_group(number),
            totals[number],
            max_ranks[number],
            step.memory,
        )
        for number, group in enumerate(groups)
        if max_ranks[number]
    }


@dataclass(frozen=True, slots=True)
class GroupTables:
    """A group's tables: ``many`` of the adapters with many rows, and ``few`` of the others, which ``lora`` computes."""

    many: ProductTables | None
    few: LoraTables | None
    vectors: VectorTables | None = None  # the factors and shifts of all

    def calls(self, x: torch.Tensor, out: torch.Tensor, threads: int) -> list[tuple[int, Arguments]]:
        """Return the kernels that add the group's LoRA into ``out``, each with its arguments for ``threads`` threads.

        ``x`` and ``out`` are as in ``lora.lora_arguments``.
        """
        many = [] if self.many is None else [(product_kernel(), product_arguments(x, out, self.many, threads))]
        few = [] if self.few is None else [(lora_kernel(), lora_arguments(x, out, self.few))]
        return [*many, *few]


def make_group_tables(
    rows: Sequence[AdapterRows], groups: Sequence[str], experts: Sequence[int] = ()
) -> dict[str, GroupTables]:
    """Return the tables of each group; arguments as for ``StepPieces``."""
    is_many = [stop - start > MAX_READ_ROWS for start, stop, _ in rows]
    is_few = [not one for one in is_many]
    products: dict[str, ProductTables] = {}
    loras: dict[str, LoraTables] = {}
    if any(is_many):
        products = make_product_tables([*compress(rows, is_many)], groups, [*compress(experts, is_many)])
    if any(is_few):
        loras = make_tables([*compress(rows, is_few)], groups, [*compress(experts, is_few)])
    vectors: dict[str, VectorTables] = {}
    if not experts and any(len(adapter_tables(one).vectors) for _, _, one in rows):
        vectors = make_vectors(rows, groups)
    return {group: GroupTables(products.get(group), loras.get(group), vectors.get(group)) for group in groups}


def product_arguments(x: torch.Tensor, out: torch.Tensor, tables: ProductTables, threads: int) -> Arguments:
    """Return the kernel's arguments for ``threads`` threads, otherwise as ``lora.lora_arguments``."""
    # A tile of A may reach beyond the last rank; and a pitch that is no power of two keeps rows apart in a cache.
    pitch = -(-tables.max_rank // 16) * 16 + 16
    panel = max(DOT_RANKS * (SHRINK_COLS + LANES), tables.max_rank * EXPAND_COLS)
    scratch = torch.empty(threads, BLOCK_ROWS * pitch + panel)
    lengths = [len(tables.parts), len(tables.shrink), len(tables.expand), tables.cost]
    memory = tables.memory
    sizes = np.array([*lengths, *x.shape, out.shape[1], memory.num_bytes, pitch, scratch.shape[1]], dtype=np.int64)
    return sizes, x, out, memory.address, tables.parts, tables.shrink, tables.expand, scratch


def _copy(source: Any, at: int, stride: int, num_rows: int, num_cols: int, panel: Any, width: int) -> None:
    for r in range(num_rows):
        row = source[at + r * stride : at + r * stride + num_cols]
        target = panel[r * width : r * width + num_cols]
        for c in range(num_cols):
            target[c] = as_float32(row[c])


def _fill(
    entry: Any, row: int, col: int, num_rows: int, num_cols: int, pages: Any, panel: Any, at: int, width: int
) -> None:
    """Copy ``[num_rows, num_cols]`` of a piece from ``row`` and ``col`` on to rows ``width`` apart in ``panel``."""
    begin, stride = entry[OFFSET] + row * entry[PIECE_COLS] + col, entry[PIECE_COLS]
    copy(entry[DTYPE], pages, begin, stride, num_rows, num_cols, panel[at:], width)


def _shrink_block(
    entry: Any, x: Any, width: int, first: int, last: int, pages: Any, shrunk: Any, pitch: int, panel: Any
) -> None:
    """Add rows ``[first, last)`` of ``x`` times a piece of A to ``shrunk``."""
    tiled = last - (last - first) % DOT_ROWS
    num_rows, num_cols = entry[PIECE_ROWS], entry[PIECE_COLS]
    for r in range(0, num_rows, DOT_RANKS):
        ranks = min(DOT_RANKS, num_rows - r)
        target = entry[RANK_ROW] + r - first * pitch
        for begin in range(0, num_cols, SHRINK_COLS):
            cols = min(SHRINK_COLS, num_cols - begin)
            even, column = cols - cols % LANES, entry[COLUMN] + begin
            stride = even + LANES
            fill(entry, r, begin, ranks, cols, pages, panel, 0, stride)
            for i in range(ranks * stride, DOT_RANKS * stride):
                panel[i] = np.float32(0.0)
            for i in range(first, tiled, DOT_ROWS):
                dot_tile(x, i * width + column, width, panel, stride, even, shrunk, target + i * pitch, pitch)
            for i in range(tiled, last):
                dot_row(x, i * width + column, width, panel, stride, even, shrunk, target + i * pitch, pitch)
            if even < cols:
                for i in range(first, last):
                    for j in range(ranks):
                        for c in range(even, cols):
                            shrunk[target + i * pitch + j] += panel[j * stride + c] * x[i * width + column + c]


def _expand_block(
    entry: Any, out: Any, width: int, first: int, last: int, pages: Any, shrunk: Any, pitch: int, panel: Any
) -> None:
    """Add rows ``[first, last)`` of ``shrunk`` times a piece of B^T to ``out``."""
    tiled = last - (last - first) % AXPY_ROWS
    ranks, num_cols = entry[PIECE_ROWS], entry[PIECE_COLS]
    even = num_cols - num_cols % AXPY_WIDTH
    source, size = entry[RANK_ROW] - first * pitch, ranks * AXPY_WIDTH
    for begin in range(0, even, EXPAND_COLS):
        num = min(EXPAND_COLS, even - begin) // AXPY_WIDTH
        for p in range(num):
            fill(entry, 0, begin + p * AXPY_WIDTH, ranks, AXPY_WIDTH, pages, panel, p * size, AXPY_WIDTH)
        target = entry[COLUMN] + begin
        for i in range(first, tiled, AXPY_ROWS):
            for p in range(num):
                at = target + i * width + p * AXPY_WIDTH
                axpy_tile(shrunk, source + i * pitch, pitch, panel, p * size, ranks, out, at, width)
        for i in range(tiled, last):
            for p in range(num):
                at = target + i * width + p * AXPY_WIDTH
                axpy_row(shrunk, source + i * pitch, pitch, panel, p * size, ranks, out, at, width)
    if even < num_cols:
        fill(entry, 0, even, ranks, num_cols - even, pages, panel, 0, AXPY_WIDTH)
        target = entry[COLUMN] + even
        for i in range(first, last):
            for r in range(ranks):
                for c in range(num_cols - even):
                    out[target + i * width + c] += shrunk[source + i * pitch + r] * panel[r * AXPY_WIDTH + c]


def _multiply(pointers: Any) -> None:
    thread, threads = thread_num(), num_threads()
    sizes = carray(pointers[0], 10, np.int64)
    num_parts, num_shrink, num_expand, total, num_rows, num_in, num_out, num_bytes, pitch, length = sizes
    x = carray(pointers[1], num_rows * num_in, np.float32)
    out = carray(pointers[2], num_rows * num_out, np.float32)
    pages = typed_views(pointers[3], num_bytes)
    parts = carray(pointers[4], (num_parts, NUM_PART_FIELDS), np.int64)
    shrink = carray(pointers[5], (num_shrink, NUM_FIELDS), np.int64)
    expand = carray(pointers[6], (num_expand, NUM_FIELDS), np.int64)
    scratch = carray(pointers[7], (threads, length), np.float32)[thread]
    shrunk, panel = scratch[: BLOCK_ROWS * pitch], scratch[BLOCK_ROWS * pitch :]
    for n in range(num_parts):
        part = parts[n]
        low, high = share(thread, threads, total, part[BEGIN], part[COST])
        low, high = min(low * AXPY_ROWS, part[ROWS]), min(high * AXPY_ROWS, part[ROWS])
        for first in range(part[FIRST] + low, part[FIRST] + high, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, part[FIRST] + high)
            shrunk[: (last - first) * pitch] = np.float32(0.0)
            for e in range(part[FIRST_A], part[LAST_A]):
                shrink_block(shrink[e], x, num_in, first, last, pages, shrunk, pitch, panel)
            for e in range(part[FIRST_B], part[LAST_B]):
                expand_block(expand[e], out, num_out, first, last, pages, shrunk, pitch, panel)


copy = by_type(njit(_copy))
fill = njit(cache=True)(_fill)
shrink_block = njit(cache=True, fastmath=FAST_MATH)(_shrink_block)
expand_block = njit(cache=True, fastmath=FAST_MATH)(_expand_block)


@cache
def product_kernel() -> int:
    """Return the kernel's address; the first call compiles it."""
    return compile_kernel(_multiply)
