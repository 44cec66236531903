"""Tables with the places of adapters' pieces, for the compiled LoRA kernels.

::

    layout           TableTemplate   lines of all groups, with places in pages      once for adapters of a shape
    adapter          AdapterTables   the same, with places in memory                when it comes to a memory
    rows of a step   StepPieces      those of its adapters, group by group          when the rows change

The second and third take a few operations on all groups at once. A step waits for the third; the thread that copies
adapters makes the second, and holds the interpreter lock meanwhile.

A step's rows change whenever a sequence joins or leaves, and then the tables of every group do. So the lines of all
adapters are gathered once for all groups, and a group's table is a stretch of the result::

    adapters   | 0: group 0, 1, 2 ... | 1: group 0, 1, 2 ... | ...
    gathered   | group 0: of adapter 0, 1 ... | group 1: of adapter 0, 1 ... | ...

All work of a group is laid end to end, and every thread takes an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout, GroupLayout, Tile, cut_by_expert, merge_tiles, vector_elements
from manylora.core.adapters.shape import ELEMENT_BYTES
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
    "RANK_ROW",
    "START",
    "UNIT",
    "MemorySpan",
    "StepPieces",
    "StepVectors",
    "Table",
    "adapter_tables",
    "before",
    "prepare_tables",
    "share",
]

# Columns of a table: rows of the batch; the piece's offset, size and type; its place in the matrix; the matrix's start
# among all work, and the work of a rank row (or of 16 output columns).
FIRST_ROW, NUM_ROWS, OFFSET, PIECE_ROWS, PIECE_COLS, DTYPE, RANK_ROW, COLUMN, BEGIN, START, COST, NUM_FIELDS = range(12)

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
    first: Table  # first line of each group, and 0 for one more that has none ``[groups + 1]``
    count: Table  # number of lines of each group, and 0 for one more ``[groups + 1]``

    @classmethod
    def of(cls, groups: Sequence[Sequence[tuple[int, ...]]]) -> TableLines:
        """Return the lines of groups; a line begins with its page."""
        lines = np.array([line for group in groups for line in group], dtype=np.int64).reshape(-1, 1 + NUM_FIELDS)
        count = np.array([*map(len, groups), 0])
        first = np.cumsum(count) - count
        first[-1] = 0
        return cls(np.ascontiguousarray(lines[:, 1:]), lines[:, 0].copy(), first, count)

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
    ranks: Table  # rank of each group, and 0 for one more that has no weights ``[groups + 1]``
    expand_costs: Table  # work of each group's modules, and 0 for one more
    sizes: Table  # number of weights of each group, and 0 for one more
    element_bytes: int  # bytes of a weight


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTables:
    """An adapter's pieces in its memory, which it does not keep alive; kept with its weights."""

    template: TableTemplate
    shrink: Table
    expand: Table
    vectors: Table
    memory: MemorySpan


def adapter_tables(weights: AdapterMemory, of_experts: str = "") -> AdapterTables:
    """Return the tables of an adapter, or those of a group ``of_experts``; made on first use."""
    key = f"compiled {of_experts}"
    if key not in weights.prepared:
        template, flat = _template(weights.layout, of_experts), weights.flat
        pages = np.asarray(weights.pages, dtype=np.int64)
        weights.prepared[key] = AdapterTables(
            template,
            template.shrink.placed(pages, flat.shape[1]),
            template.expand.placed(pages, flat.shape[1]),
            template.vectors.placed(pages, flat.shape[1]),
            MemorySpan(flat.data_ptr(), flat.nbytes),
        )
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
    return TableTemplate(
        {name: number for number, name in enumerate(groups)},
        TableLines.of(shrink),
        TableLines.of(expand),
        TableLines.of(vectors),
        np.array([*(group.rank for group in groups.values()), 0]),
        np.array([*expand_costs, 0]),
        np.array([*sizes, 0]),
        ELEMENT_BYTES[layout.dtype],
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
    ranks, costs, sizes = (
        np.array([*[value] * num, 0])
        for value in (rank, -(-num_out // UNIT) * rank, rank * (group.in_features + num_out))
    )
    a_lines, b_lines, none = TableLines.of(shrink), TableLines.of(expand), TableLines.of([()] * num)
    return TableTemplate({}, a_lines, b_lines, none, ranks, costs, sizes, ELEMENT_BYTES[dtype])


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Lines of several adapters, group by group, and in a group adapter by adapter."""

    table: Table  # ``[n, NUM_FIELDS]``, a copy; OFFSET counts from the memory of all adapters
    adapters: Table  # adapter of each line ``[n]``
    counts: Table  # lines of each adapter in each group ``[adapters, groups]``
    bounds: list[int]  # first line of each group, and the number of all lines

    @classmethod
    def of(cls, tables: Sequence[Table], lines: Sequence[TableLines], numbers: Table, shifts: Table) -> Pieces:
        """Gather the lines of groups ``numbers`` ``[adapters, groups]``; ``shifts`` are added to the offsets."""
        num_adapters, num_groups = numbers.shape
        own = {id(table): table for table in tables}  # experts of one adapter share its table
        ends_of_own = dict(zip(own, np.cumsum([len(table) for table in own.values()]).tolist(), strict=True))
        begins = np.array([ends_of_own[id(table)] - len(table) for table in tables])
        counts = np.stack([one.count[row] for one, row in zip(lines, numbers, strict=True)])
        first = np.stack([one.first[row] for one, row in zip(lines, numbers, strict=True)]) + begins[:, None]
        flat = counts.T.ravel()
        ends = np.cumsum(flat)
        chosen = np.repeat(first.T.ravel() - ends + flat, flat)
        chosen += np.arange(len(chosen))
        adapters = np.repeat(np.tile(np.arange(num_adapters), num_groups), flat)
        table = np.concatenate([*own.values()])[chosen]
        table[:, OFFSET] += shifts[adapters]
        return cls(table, adapters, counts, [0, *ends[num_adapters - 1 :: num_adapters].tolist()])

    def of_group(self, number: int) -> Table:
        """Return the lines of a group."""
        return self.table[self.bounds[number] : self.bounds[number + 1]]

    def spread(self, values: Table) -> Table:
        """Return for each line the value of its adapter and group, of ``[adapters, groups]``."""
        return np.repeat(values.T.ravel(), self.counts.T.ravel())


class _StepTables:
    """The tables of the adapters of a step, for some groups.

    ``experts`` has the expert of each of the rows, if there is one group, of experts' linears.
    """

    def __init__(self, rows: Sequence[AdapterRows], groups: Sequence[str], experts: Sequence[int] = ()) -> None:
        of_experts = groups[0] if experts else ""
        self.tables = [adapter_tables(weights, of_experts) for _, _, weights in rows]
        self.templates = [table.template for table in self.tables]
        if experts:
            self.numbers = np.array(experts)[:, None]
        else:  # adapters of one layout share a template
            templates = {id(one): one for one in self.templates}
            found = {key: [one.numbers.get(group, -1) for group in groups] for key, one in templates.items()}
            self.numbers = np.array([found[id(one)] for one in self.templates])
        self.first_row = np.array([start for start, _, _ in rows])
        self.num_rows = np.array([stop - start for start, stop, _ in rows])
        self.memory, self.shifts = _common_memory(self.tables)


class StepVectors(_StepTables):
    """The factors and shifts of the adapters of a step, for some groups."""

    def __init__(self, rows: Sequence[AdapterRows], groups: Sequence[str]) -> None:
        super().__init__(rows, groups)
        lines = [one.vectors for one in self.templates]
        self.pieces = Pieces.of([one.vectors for one in self.tables], lines, self.numbers, self.shifts)
        self.pieces.table[:, FIRST_ROW] = self.first_row[self.pieces.adapters]
        self.pieces.table[:, NUM_ROWS] = self.num_rows[self.pieces.adapters]


class StepPieces(_StepTables):
    """The pieces of the adapters of a step, for some groups."""

    def __init__(self, rows: Sequence[AdapterRows], groups: Sequence[str], experts: Sequence[int] = ()) -> None:
        super().__init__(rows, groups, experts)
        tables, templates, numbers, shifts = self.tables, self.templates, self.numbers, self.shifts
        self.element_bytes = np.array([one.element_bytes for one in templates])
        self.shrink = Pieces.of([one.shrink for one in tables], [one.shrink for one in templates], numbers, shifts)
        self.expand = Pieces.of([one.expand for one in tables], [one.expand for one in templates], numbers, shifts)
        self.ranks, self.expand_costs, self.sizes = (
            np.stack([values[row] for values, row in zip(of_each, numbers, strict=True)])
            for of_each in zip(*((one.ranks, one.expand_costs, one.sizes) for one in templates), strict=True)
        )
        """Of each adapter in each group, 0 if it has no weights there ``[adapters, groups]``."""


def before(values: Table) -> Table:
    """Return the sums over the adapters before each, of ``[adapters, groups]``."""
    return np.cumsum(values, axis=0) - values


def _common_memory(tables: Sequence[AdapterTables]) -> tuple[MemorySpan, Table]:
    """Return memory that all adapters lie in, and by how much each one's offsets grow there, in its own numbers.

    Adapters on the device lie in one pool; each one that is read from the host lies in an image of its own. The memory
    begins with the lowest of them, so that no offset is negative, and the memory between them is never read.
    """
    memory = tables[0].memory
    if all(table.memory == memory for table in tables):
        return memory, np.zeros(len(tables), dtype=np.int64)
    begin = min(table.memory.address for table in tables)
    end = max(table.memory.address + table.memory.num_bytes for table in tables)
    shifts = [(table.memory.address - begin) // table.template.element_bytes for table in tables]
    return MemorySpan(begin, end - begin), np.array(shifts)


def _share(thread: int, num_threads: int, total: int, start: int, cost: int) -> tuple[int, int]:
    """Return the units of ``cost`` each, from ``start`` on, that begin in the thread's share of ``[0, total)``."""
    first = (total * thread // num_threads - start + cost - 1) // cost
    last = (total * (thread + 1) // num_threads - start + cost - 1) // cost
    return max(first, 0), max(last, 0)


share = njit(cache=True)(_share)
