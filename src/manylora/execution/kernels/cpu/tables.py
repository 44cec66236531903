"""Tables with the places of adapters' pieces, for the compiled LoRA kernels.

The table of one adapter's group is made once and kept while its weights stay in place; a step joins the tables of its
adapters. All work is laid end to end, and every thread takes an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from manylora.execution.storage.resident import Piece, ResidentGroup

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
    "GroupTable",
    "Memory",
    "Table",
    "group_table",
    "share",
    "span",
]

# Columns of a table: rows of the batch; the piece's offset, size and type; its place in the matrix; the matrix's start
# among all work, and the work of a rank row (or of 16 output columns).
FIRST_ROW, NUM_ROWS, OFFSET, PIECE_ROWS, PIECE_COLS, DTYPE, RANK_ROW, COLUMN, BEGIN, START, COST, NUM_FIELDS = range(12)

# Output columns are divided among threads by cache lines.
UNIT = 16

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

Table = NDArray[np.int64]


class Memory(NamedTuple):
    """A stretch of memory that offsets count from the beginning of."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GroupTable:
    """One adapter's part of a step's tables, for one row at a cost of one; kept with its weights.

    ``shrink`` are pieces of its A stack and ``expand`` of its B^T, each ``[n, NUM_FIELDS]``; a module's columns begin
    at BEGIN. ``expand_cost`` is the work of its modules. Offsets count from ``memory``, the storage of the weights,
    which they keep alive.
    """

    shrink: Table
    expand: Table
    expand_cost: int
    element_bytes: int
    memory: Memory


def group_table(weights: ResidentGroup) -> GroupTable:
    """Return the table of ``weights``, made on first use."""
    if "compiled" not in weights.prepared:
        weights.prepared["compiled"] = _make_group_table(weights)
    return cast(GroupTable, weights.prepared["compiled"])


def _make_group_table(weights: ResidentGroup) -> GroupTable:
    def line(piece: Piece, row: int, begin: int, start: int, cost: int) -> tuple[int, ...]:
        weight = piece.weight
        place = (weight.storage_offset(), *weight.shape, _CODES[weight.dtype])
        return (0, 1, *place, row + piece.row, begin + piece.col, begin, start, cost)

    # By column: the first piece of a row starts its sum, the others add to it.
    shrink = [line(piece, 0, 0, 0, 1) for piece in sorted(weights.a, key=lambda piece: piece.col)]
    expand: list[tuple[int, ...]] = []
    total = 0
    for module in weights.modules:
        expand.extend(line(piece, module.row, module.offset, total, module.rank) for piece in module.b)
        width = max(piece.col + piece.weight.shape[1] for piece in module.b)
        total += -(-width // UNIT) * module.rank
    first = weights.a[0].weight
    storage = first.untyped_storage()
    return GroupTable(
        np.array(shrink, dtype=np.int64),
        np.array(expand, dtype=np.int64),
        total,
        first.itemsize,
        Memory(storage.data_ptr(), storage.nbytes()),
    )


def span(tables: Sequence[GroupTable]) -> tuple[Memory, list[int]]:
    """Return memory that all tables lie in, and by how much each one's offsets grow there, in its own numbers.

    Adapters on the device lie in one pool; each one that is read from the host lies in an image of its own. The memory
    begins with the lowest of them, so that no offset is negative, and what is between them is never read.
    """
    memory = tables[0].memory
    if all(table.memory == memory for table in tables):
        return memory, [0] * len(tables)
    begin = min(table.memory.address for table in tables)
    end = max(table.memory.address + table.memory.num_bytes for table in tables)
    return Memory(begin, end - begin), [(table.memory.address - begin) // table.element_bytes for table in tables]


def _share(thread: int, num_threads: int, total: int, start: int, cost: int) -> tuple[int, int]:
    """Return the units of ``cost`` each, from ``start`` on, that begin in the thread's share of ``[0, total)``."""
    first = (total * thread // num_threads - start + cost - 1) // cost
    last = (total * (thread + 1) // num_threads - start + cost - 1) // cost
    return max(first, 0), max(last, 0)


share = njit(cache=True)(_share)
