"""Tables with the places of adapters' pieces, for the compiled LoRA kernels.

::

    layout           TableTemplate   lines of all groups, with places in pages      once for adapters of a shape
    adapter          AdapterTables   the same, with places in memory                when it comes to a memory
    rows of a step   StepPieces      those of its adapters, group by group          when the rows change

The second and third take a few operations on all groups at once. A step waits for the third; the thread that copies
adapters makes the second, and holds the interpreter lock meanwhile.

A step's rows change whenever a sequence joins or leaves, and then the tables of every group do. So the lines of all
adapters are gathered once for all groups, by a compiled loop, and a group's table is a stretch of the result::

    adapters   | 0: group 0, 1, 2 ... | 1: group 0, 1, 2 ... | ...
    gathered   | group 0: of adapter 0, 1 ... | group 1: of adapter 0, 1 ... | ...

All work of a group is laid end to end, and every thread takes an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout, GroupLayout, Tile, cut_by_expert, merge_tiles, vector_elements
from manylora.core.adapters.shape import ELEMENT_BYTES
from manylora.execution.kernels.cpu.openmp import compile_kernel, run_here
from manylora.execution.storage.resident import AdapterMemory, AdapterRows

__all__ = [
    "BEGIN",
    "COLUMN",
    "COST",
    "DTYPE",
    "FIRST_ROW",
    "NUM_FIELDS",
    "NUM_ROWS",
    "OFFSET",
    "PIECE_COLS",
    "PIECE_ROWS",
    "RANK",
    "RANK_ROW",
    "SIZE",
    "START",
    "UNIT",
    "MemorySpan",
    "Pieces",
    "StepPieces",
    "Table",
    "adapter_tables",
    "before",
    "lines_kernel",
    "prepare_tables",
    "share",
]

# Columns of a table: rows of the batch; the piece's offset, size and type; its place in the matrix; the matrix's start
# among all work, and the work of a rank row (or of 16 output columns).
FIRST_ROW, NUM_ROWS, OFFSET, PIECE_ROWS, PIECE_COLS, DTYPE, RANK_ROW, COLUMN, BEGIN, START, COST, NUM_FIELDS = range(12)

# Columns of a directory: a group's rank, the work of its modules and its number of weights; then the first line and the
# number of lines of its shrink, its expand and its vectors.
RANK, EXPAND_COST, SIZE, OF_SHRINK, _, OF_EXPAND, _, OF_VECTORS, _, NUM_COLUMNS = range(10)

# Output columns are divided among threads by cache lines.
UNIT = 16

_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}

Table = NDArray[np.int64]


class MemorySpan(NamedTuple):
    """A stretch of memory; offsets count from its beginning."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class TableLines:
    """Lines of a table, group by group."""

    table: Table  # ``[n, NUM_FIELDS]``, for one row at a cost of one; OFFSET counts from the front of the piece's page
    pages: Table  # the piece's page, as a number among the adapter's own ``[n]``
    places: Table  # first line and number of lines of each group ``[groups, 2]``

    @classmethod
    def of(cls, groups: Sequence[Sequence[tuple[int, ...]]]) -> TableLines:
        """Return the lines of groups; a line begins with its page."""
        lines = np.array([line for group in groups for line in group], dtype=np.int64).reshape(-1, 1 + NUM_FIELDS)
        count = np.array([*map(len, groups)], dtype=np.int64)
        places = np.column_stack([np.cumsum(count) - count, count])
        return cls(np.ascontiguousarray(lines[:, 1:]), lines[:, 0].copy(), places)

    def placed(self, pages: Table, page_elements: int) -> Table:
        """Return the table with OFFSET counted from the memory of ``pages``."""
        table = self.table.copy()
        table[:, OFFSET] += pages[self.pages] * page_elements
        return table


@dataclass(frozen=True, slots=True, eq=False)
class TableTemplate:
    """A layout's pieces before its pages are known.

    Of a group of experts' linears it is another one, in which each expert is a group.
    """

    numbers: dict[str, int]  # number of each group, by name; empty if experts are the groups
    shrink: TableLines  # pieces of the A stacks
    expand: TableLines  # pieces of B^T; a module's columns begin at BEGIN
    vectors: TableLines  # pieces of factors (RANK_ROW is 0), then of shifts (1), in float32 numbers but for OFFSET
    directory: Table  # of each group, and 0 for one more that has no weights ``[groups + 1, NUM_COLUMNS]``
    element_bytes: int  # bytes of a weight

    @classmethod
    def of(
        cls,
        numbers: dict[str, int],
        lines: tuple[TableLines, TableLines, TableLines],
        sums: Sequence[tuple[int, int, int]],
        dtype: str,
    ) -> TableTemplate:
        """Return a template with these ``lines`` of shrink, expand and vectors, and RANK, EXPAND_COST and SIZE."""
        own = [np.array(sums, dtype=np.int64).reshape(-1, 3), *[one.places for one in lines]]
        directory = np.vstack([np.hstack(own), np.zeros((1, NUM_COLUMNS), dtype=np.int64)])
        return cls(numbers, *lines, directory, ELEMENT_BYTES[dtype])


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTables:
    """An adapter's pieces in its memory, which it does not keep alive; kept with its weights."""

    template: TableTemplate
    shrink: Table
    expand: Table
    vectors: Table
    memory: MemorySpan
    addresses: tuple[int, int, int]  # of the three tables: to ask an array for its own takes a microsecond

    @classmethod
    def of(cls, template: TableTemplate, weights: AdapterMemory) -> AdapterTables:
        """Return the tables of an adapter of that shape."""
        pages, flat = np.asarray(weights.pages, dtype=np.int64), weights.flat
        lines = (template.shrink, template.expand, template.vectors)
        shrink, expand, vectors = (one.placed(pages, flat.shape[1]) for one in lines)
        addresses = shrink.ctypes.data, expand.ctypes.data, vectors.ctypes.data
        return cls(template, shrink, expand, vectors, MemorySpan(flat.data_ptr(), flat.nbytes), addresses)


def adapter_tables(weights: AdapterMemory, of_experts: str = "") -> AdapterTables:
    """Return the tables of an adapter, or those of a group ``of_experts``; made on first use."""
    key = f"compiled {of_experts}"
    if key not in weights.prepared:
        weights.prepared[key] = AdapterTables.of(_template(weights.layout, of_experts), weights)
    return cast(AdapterTables, weights.prepared[key])


def prepare_tables(weights: AdapterMemory) -> None:
    """Make all tables of an adapter."""
    adapter_tables(weights)
    for group in weights.layout.groups.values():
        if group.num_experts:
            adapter_tables(weights, group.group)


def _template(layout: AdapterLayout, of_experts: str) -> TableTemplate:
    key = f"compiled {of_experts}"
    if key not in layout.prepared:
        group = layout.groups.get(of_experts)
        layout.prepared[key] = _make_template(layout) if group is None else _expert_template(group, layout.dtype)
    return cast(TableTemplate, layout.prepared[key])


def _line(run: Tile, code: int, row: int, begin: int, start: int, cost: int) -> tuple[int, ...]:
    """Return a line of a table behind its page."""
    place = (run.page, 0, 1, run.offset, run.num_rows, run.num_cols, code)
    return (*place, row + run.row, begin + run.col, begin, start, cost)


def _make_template(layout: AdapterLayout) -> TableTemplate:
    code, width = _CODES[layout.dtype], vector_elements(layout.dtype)
    line = partial(_line, code=code)

    def number_line(run: Tile, is_shift: bool, offset: int) -> tuple[int, ...]:
        num_cols = run.num_cols // width
        return (run.page, 0, 1, run.offset, 1, num_cols, code, int(is_shift), offset + run.col // width, 0, 0, 0)

    groups = {name: group for name, group in layout.groups.items() if not group.num_experts}
    shrink, expand, vectors, expand_costs = [], [], [], []
    for group in groups.values():
        # By column: the first piece of a row starts its sum, the others add to it.
        shrink.append(
            [
                line(run, row=0, begin=0, start=0, cost=1)
                for run in sorted(merge_tiles(group.a), key=lambda run: run.col)
            ]
        )
        lines: list[tuple[int, ...]] = []
        total = 0
        for part in group.modules:
            begin = part.module.offset
            lines += [line(run, row=part.row, begin=begin, start=total, cost=part.rank) for run in merge_tiles(part.b)]
            total += -(-part.module.num_rows // UNIT) * part.rank
        expand.append(lines)
        of_group = [(kind, part, tiles) for part in group.modules for kind, tiles in part.vectors]
        of_group.sort(key=lambda one: not one[0].is_factor)
        vectors.append(
            [
                number_line(run, not kind.is_factor, part.module.offset)
                for kind, part, tiles in of_group
                for run in merge_tiles(tiles)
            ]
        )
        expand_costs.append(total)
    sizes = [
        group.rank * group.in_features + sum(part.rank * part.module.num_rows for part in group.modules)
        for group in groups.values()
    ]
    ranks = [group.rank for group in groups.values()]
    return TableTemplate.of(
        {name: number for number, name in enumerate(groups)},
        (TableLines.of(shrink), TableLines.of(expand), TableLines.of(vectors)),
        [*zip(ranks, expand_costs, sizes, strict=True)],
        layout.dtype,
    )


def _expert_template(group: GroupLayout, dtype: str) -> TableTemplate:
    """Return the pieces of a group of experts' linears, expert by expert."""
    (part,) = group.modules
    num, code, num_out = group.num_experts, _CODES[dtype], part.module.out_features
    rank = part.rank // num
    shrink: list[list[tuple[int, ...]]] = [[] for _ in range(num)]
    expand: list[list[tuple[int, ...]]] = [[] for _ in range(num)]
    a = sorted(group.a, key=lambda tile: (tile.col, tile.row))
    for tiles, lines, cost in ((a, shrink, 1), (part.b, expand, rank)):
        for expert, run in cut_by_expert(tiles, rank):
            lines[expert].append(_line(run, code, 0, 0, 0, cost))
    sums = (rank, -(-num_out // UNIT) * rank, rank * (group.in_features + num_out))
    found = TableLines.of(shrink), TableLines.of(expand), TableLines.of([()] * num)
    return TableTemplate.of({}, found, [sums] * num, dtype)


class Pieces(NamedTuple):
    """Lines of several adapters, group by group, and in a group adapter by adapter."""

    table: Table  # ``[n, NUM_FIELDS]``; OFFSET counts from the memory of all adapters
    counts: Table  # lines of each adapter in each group ``[adapters, groups]``
    bounds: list[int]  # first line of each group, and the number of all lines
    costs: list[int]  # all work of each group

    def of_group(self, number: int) -> Table:
        """Return the lines of a group."""
        return self.table[self.bounds[number] : self.bounds[number + 1]]


class StepPieces:
    """The pieces of the adapters of a step, for some groups.

    ``experts`` has the expert of each of the rows, if there is one group, of experts' linears.
    """

    def __init__(self, rows: Sequence[AdapterRows], groups: Sequence[str], experts: Sequence[int] = ()) -> None:
        of_experts = groups[0] if experts else ""
        self._tables = tables = [adapter_tables(weights, of_experts) for _, _, weights in rows]
        templates = [one.template for one in tables]
        if experts:
            found = [one.directory[[expert]] for one, expert in zip(templates, experts, strict=True)]
        else:  # adapters of one layout share a template
            own = {id(one): one for one in templates}
            of = {key: one.directory[[one.numbers.get(group, -1) for group in groups]] for key, one in own.items()}
            found = [of[id(one)] for one in templates]
        self.directory = np.array(found)
        """Of each adapter in each group, 0 if it has no weights there ``[adapters, groups, NUM_COLUMNS]``."""
        self.memory, shifts = _common_memory(tables)
        # First row, number of rows, shift of offsets, and the cost of a weight: its bytes to read; a row's arithmetic
        # costs about as much as one byte.
        self.rows = np.array(
            [
                (start, stop - start, shift, one.element_bytes + stop - start)
                for (start, stop, _), shift, one in zip(rows, shifts, templates, strict=True)
            ],
            dtype=np.int64,
        )

    def shrink(self) -> Pieces:
        """Return the pieces of A stacks."""
        return self._gather(0, OF_SHRINK, RANK)

    def expand(self) -> Pieces:
        """Return the pieces of B^T."""
        return self._gather(1, OF_EXPAND, EXPAND_COST)

    def vectors(self) -> Pieces:
        """Return the pieces of factors and shifts; the work is another's."""
        return self._gather(2, OF_VECTORS, RANK)

    def _gather(self, kind: int, place: int, work: int) -> Pieces:
        """Return the lines of one of the adapters' tables; ``place`` and ``work`` are columns of the directory."""
        counts = self.directory[:, :, place + 1]
        bounds = [0, *np.cumsum(counts.sum(axis=0)).tolist()]
        costs = (self.rows[:, 3] @ self.directory[:, :, work]).tolist()
        table = np.empty((bounds[-1], NUM_FIELDS), dtype=np.int64)
        sizes = np.array([*counts.shape, len(table), place, work])
        addresses = [one.addresses[kind] for one in self._tables]
        run_here(lines_kernel(), sizes, self.directory, self.rows, table, *addresses)
        return Pieces(table, counts, bounds, costs)


def _gather_lines(pointers: Any) -> None:
    """Copy each group's lines, with each adapter's rows, its shift of offsets, its costs and the work before it."""
    sizes = carray(pointers[0], 5, np.int64)
    num_adapters, num_groups, num_lines, place, work = sizes
    directory = carray(pointers[1], (num_adapters, num_groups, NUM_COLUMNS), np.int64)
    rows = carray(pointers[2], (num_adapters, 4), np.int64)
    table = carray(pointers[3], (num_lines, NUM_FIELDS), np.int64)
    at = 0
    for group in range(num_groups):
        begin = 0
        for adapter in range(num_adapters):
            first, count = directory[adapter, group, place], directory[adapter, group, place + 1]
            lines = carray(pointers[4 + adapter], (first + count, NUM_FIELDS), np.int64)
            first_row, num_rows, shift, cost = rows[adapter]
            for number in range(first, first + count):
                for field in range(NUM_FIELDS):
                    table[at, field] = lines[number, field]
                table[at, FIRST_ROW], table[at, NUM_ROWS] = first_row, num_rows
                table[at, OFFSET] += shift
                table[at, START] = table[at, START] * cost + begin
                table[at, COST] *= cost
                at += 1
            begin += directory[adapter, group, work] * cost


@cache
def lines_kernel() -> int:
    """Return the kernel's address; the first call compiles it."""
    return compile_kernel(_gather_lines)


def before(values: Table) -> Table:
    """Return the sums over the adapters before each, of ``[adapters, groups]``."""
    return np.cumsum(values, axis=0) - values


def _common_memory(tables: Sequence[AdapterTables]) -> tuple[MemorySpan, list[int]]:
    """Return memory that all adapters lie in, and by how much each one's offsets grow there, in its own numbers.

    Adapters on the device lie in one pool; each one that is read from the host lies in an image of its own. The memory
    begins with the lowest of them, so that no offset is negative, and the memory between them is never read.
    """
    memory = tables[0].memory
    if all(table.memory == memory for table in tables):
        return memory, [0] * len(tables)
    begin = min(table.memory.address for table in tables)
    end = max(table.memory.address + table.memory.num_bytes for table in tables)
    shifts = [(table.memory.address - begin) // table.template.element_bytes for table in tables]
    return MemorySpan(begin, end - begin), shifts


def _share(thread: int, num_threads: int, total: int, start: int, cost: int) -> tuple[int, int]:
    """Return the units of ``cost`` each, from ``start`` on, that begin in the thread's share of ``[0, total)``."""
    first = (total * thread // num_threads - start + cost - 1) // cost
    last = (total * (thread + 1) // num_threads - start + cost - 1) // cost
    return max(first, 0), max(last, 0)


share = njit(cache=True)(_share)
