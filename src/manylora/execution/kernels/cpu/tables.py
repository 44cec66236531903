"""Tables with the places of adapters' pieces, for the compiled LoRA kernels.

::

    layout           TableTemplate   lines of all groups, with places in pages      once for adapters of a shape
    adapter          AdapterTables   the same, with places in memory                when it comes to a memory
    rows of a step   StepPieces      those of its adapters, group by group          when the rows change

The third is in ``step_pieces``. The second and third take a few operations on all groups at once. A step waits for the
third; the thread that copies adapters makes the second, and holds the interpreter lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout, Tile
from manylora.core.adapters.shape import ELEMENT_BYTES
from manylora.execution.storage.resident import AdapterMemory, merge_tiles

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
    "AdapterTables",
    "MemorySpan",
    "Table",
    "TableLines",
    "adapter_tables",
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
    """A stretch of memory that offsets count from the beginning of."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class TableLines:
    """Lines of a table, group by group.

    Args:
        table: ``[n, NUM_FIELDS]``, for one row at a cost of one; OFFSET counts from the front of the piece's page.
        pages: The piece's page, as a number among the adapter's own ``[n]``.
        first: First line of each group, and 0 for one more that has none ``[groups + 1]``.
        count: Lines of each, likewise.
    """

    table: Table
    pages: Table
    first: Table
    count: Table

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

    Args:
        numbers: Number of each group, by name.
        shrink: Pieces of the A stacks.
        expand: Pieces of B^T; a module's columns begin at BEGIN.
        ranks: Rank of each group, and 0 for one more that has no weights ``[groups + 1]``.
        expand_costs: Work of each group's modules, likewise.
        sizes: Weights of each group, likewise.
        element_bytes: Bytes of a weight.
    """

    numbers: dict[str, int]
    shrink: TableLines
    expand: TableLines
    ranks: Table
    expand_costs: Table
    sizes: Table
    element_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTables:
    """An adapter's pieces in its memory, which it does not keep alive; kept with its weights."""

    template: TableTemplate
    shrink: Table
    expand: Table
    memory: MemorySpan


def adapter_tables(weights: AdapterMemory) -> AdapterTables:
    """Return the tables of an adapter, made on first use."""
    if "compiled" not in weights.prepared:
        template, flat = _template(weights.layout), weights.flat
        pages = np.asarray(weights.pages, dtype=np.int64)
        weights.prepared["compiled"] = AdapterTables(
            template,
            template.shrink.placed(pages, flat.shape[1]),
            template.expand.placed(pages, flat.shape[1]),
            MemorySpan(flat.data_ptr(), flat.nbytes),
        )
    return cast(AdapterTables, weights.prepared["compiled"])


def _template(layout: AdapterLayout) -> TableTemplate:
    if "compiled" not in layout.prepared:
        layout.prepared["compiled"] = _make_template(layout)
    return cast(TableTemplate, layout.prepared["compiled"])


def _make_template(layout: AdapterLayout) -> TableTemplate:
    code = _CODES[layout.dtype]

    def line(run: Tile, row: int, begin: int, start: int, cost: int) -> tuple[int, ...]:
        place = (run.page, 0, 1, run.offset, run.num_rows, run.num_cols, code)
        return (*place, row + run.row, begin + run.col, begin, start, cost)

    shrink, expand, expand_costs = [], [], []
    for group in layout.groups.values():
        # By column: the first piece of a row starts its sum, the others add to it.
        shrink.append([line(run, 0, 0, 0, 1) for run in sorted(merge_tiles(group.a), key=lambda run: run.col)])
        lines: list[tuple[int, ...]] = []
        total = 0
        for part in group.modules:
            lines += [line(run, part.row, part.module.offset, total, part.rank) for run in merge_tiles(part.b)]
            total += -(-part.module.out_features // UNIT) * part.rank
        expand.append(lines)
        expand_costs.append(total)
    sizes = [
        group.rank * group.in_features + sum(part.rank * part.module.out_features for part in group.modules)
        for group in layout.groups.values()
    ]
    return TableTemplate(
        {name: number for number, name in enumerate(layout.groups)},
        TableLines.of(shrink),
        TableLines.of(expand),
        np.array([*(group.rank for group in layout.groups.values()), 0]),
        np.array([*expand_costs, 0]),
        np.array([*sizes, 0]),
        ELEMENT_BYTES[layout.dtype],
    )


def _share(thread: int, num_threads: int, total: int, start: int, cost: int) -> tuple[int, int]:
    """Return the units of ``cost`` each, from ``start`` on, that begin in the thread's share of ``[0, total)``."""
    first = (total * thread // num_threads - start + cost - 1) // cost
    last = (total * (thread + 1) // num_threads - start + cost - 1) // cost
    return max(first, 0), max(last, 0)


share = njit(cache=True)(_share)
