"""The pieces of all adapters of a step, for the tables of the compiled LoRA kernels.

A step's rows change whenever a sequence joins or leaves, and then the tables of every group do. So the lines of all
adapters are gathered once for all groups, and a group's table is a stretch of the result::

    adapters   | 0: group 0, 1, 2 ... | 1: group 0, 1, 2 ... | ...
    gathered   | group 0: of adapter 0, 1 ... | group 1: of adapter 0, 1 ... | ...

All work of a group is laid end to end, and every thread takes an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manylora.execution.kernels.cpu.tables import OFFSET, AdapterTables, MemorySpan, Table, TableLines, adapter_tables
from manylora.execution.storage.resident import AdapterRows

__all__ = ["Pieces", "StepPieces", "before"]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Lines of several adapters, group by group, and in a group adapter by adapter.

    Args:
        table: ``[n, NUM_FIELDS]``, a copy; OFFSET counts from the memory of all adapters.
        adapters: Adapter of each line ``[n]``.
        counts: Lines of each adapter in each group ``[adapters, groups]``.
        bounds: First line of each group, and the number of all lines.
    """

    table: Table
    adapters: Table
    counts: Table
    bounds: list[int]

    @classmethod
    def of(cls, tables: Sequence[Table], lines: Sequence[TableLines], numbers: Table, shifts: Table) -> Pieces:
        """Gather the lines of groups ``numbers`` ``[adapters, groups]``; ``shifts`` are added to the offsets."""
        num_adapters, num_groups = numbers.shape
        begins = np.cumsum([0, *map(len, tables[:-1])])
        counts = np.stack([one.count[row] for one, row in zip(lines, numbers, strict=True)])
        first = np.stack([one.first[row] for one, row in zip(lines, numbers, strict=True)]) + begins[:, None]
        flat = counts.T.ravel()
        ends = np.cumsum(flat)
        chosen = np.repeat(first.T.ravel() - ends + flat, flat)
        chosen += np.arange(len(chosen))
        adapters = np.repeat(np.tile(np.arange(num_adapters), num_groups), flat)
        table = np.concatenate(tables)[chosen]
        table[:, OFFSET] += shifts[adapters]
        return cls(table, adapters, counts, [0, *ends[num_adapters - 1 :: num_adapters].tolist()])

    def of_group(self, number: int) -> Table:
        """Return the lines of a group."""
        return self.table[self.bounds[number] : self.bounds[number + 1]]

    def spread(self, values: Table) -> Table:
        """Return for each line the value of its adapter and group, of ``[adapters, groups]``."""
        return np.repeat(values.T.ravel(), self.counts.T.ravel())


class StepPieces:
    """The pieces of the adapters of a step, for some groups.

    Args:
        rows: The rows, and their adapters.
        groups: Names.
    """

    def __init__(self, rows: Sequence[AdapterRows], groups: Sequence[str]) -> None:
        tables = [adapter_tables(weights) for _, _, weights in rows]
        templates = [table.template for table in tables]
        by_template = {id(one): [one.numbers.get(group, -1) for group in groups] for one in templates}
        numbers = np.array([by_template[id(one)] for one in templates])
        self.first_row = np.array([start for start, _, _ in rows])
        self.num_rows = np.array([stop - start for start, stop, _ in rows])
        self.element_bytes = np.array([one.element_bytes for one in templates])
        self.memory, shifts = _span(tables)
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


def _span(tables: Sequence[AdapterTables]) -> tuple[MemorySpan, Table]:
    """Return memory that all adapters lie in, and by how much each one's offsets grow there, in its own numbers.

    Adapters on the device lie in one pool; each one that is read from the host lies in an image of its own. The memory
    begins with the lowest of them, so that no offset is negative, and what is between them is never read.
    """
    memory = tables[0].memory
    if all(table.memory == memory for table in tables):
        return memory, np.zeros(len(tables), dtype=np.int64)
    begin = min(table.memory.address for table in tables)
    end = max(table.memory.address + table.memory.num_bytes for table in tables)
    shifts = [(table.memory.address - begin) // table.template.element_bytes for table in tables]
    return MemorySpan(begin, end - begin), np.array(shifts)
