"""Where the pieces of adapters lie, as numbers that the compiled LoRA kernels read.

A group of one adapter is written down once, for as long as its weights stay where they are; a step's kernels join the
tables of the adapters in it. All their work is laid end to end on a line, of which every thread takes an equal share.
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

# Columns of a table's rows: which rows of the batch; where the piece lies, how large it is and of what type; what it
# is a piece of; where that begins on the line of all work, and how much a rank row (or 16 output columns) adds to it.
FIRST_ROW, NUM_ROWS, OFFSET, PIECE_ROWS, PIECE_COLS, DTYPE, RANK_ROW, COLUMN, BEGIN, START, COST, NUM_FIELDS = range(12)

# Output columns are shared out by cache lines.
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

    Args:
        shrink: Pieces of its A stack ``[n, NUM_FIELDS]``.
        expand: Pieces of its B^T ``[n, NUM_FIELDS]``; the module's columns begin at BEGIN.
        expand_cost: Length of the line that its modules make.
        element_bytes: Size of a weight.
        memory: Where its offsets count from: the storage that the weights lie in, which they keep alive.
    """

    shrink: Table
    expand: Table
    expand_cost: int
    element_bytes: int
    memory: Memory


def group_table(weights: ResidentGroup) -> GroupTable:
    """Return the table of ``weights``, made when first asked for."""
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
    """Return which units of a thing that begins at ``start`` begin in the thread's share of ``[0, total)``."""
    first = (total * thread // num_threads - start + cost - 1) // cost
    last = (total * (thread + 1) // num_threads - start + cost - 1) // cost
    return max(first, 0), max(last, 0)


share = njit(cache=True)(_share)
