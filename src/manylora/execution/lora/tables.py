"""A step's tables for the Triton LoRA kernels: row blocks, scratch for partial sums, and the launches.

The kernels are in ``kernels/triton/lora.py`` and ``experts.py``, the tables' layouts in ``storage/tile_tables.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from manylora.execution.kernels.triton.support import is_chained, num_programs, power_of_two
from manylora.execution.storage.tile_tables import (
    BLOCK_FIELDS,
    ITEM_FIELDS,
    PART_FIELDS,
    RANGE_WIDTHS,
    AdapterTable,
    GroupDirectory,
    GroupSpan,
)

__all__ = [
    "PADDED",
    "RAGGED",
    "BatchTables",
    "Choices",
    "LoraSpace",
    "RowBlocks",
    "StepTables",
    "TableRows",
    "TableSizes",
    "measure",
]

PROMPT_ROWS = 64


class RowBlocks(NamedTuple):
    """Height of a row block, in rows: ``decode`` in steps that only decode, ``prompt`` in steps with prompts."""

    decode: int
    prompt: int

    def suit(self, rows: Sequence[TableRows]) -> int:
        """Return the height for a step: low unless an adapter has a prompt."""
        return self.decode if max(stop - start for start, stop, _ in rows) <= self.decode else self.prompt


RAGGED = RowBlocks(16, PROMPT_ROWS)  # the height of a matrix instruction, and enough rows to keep the matrix units busy
PADDED = RowBlocks(1, 1)  # every row by itself, at the largest rank of the step: the kernel for comparisons


class Tiling(NamedTuple):
    """How the kernels divide their work: counts of elements of 16 bits, half as many of 32."""

    split_columns: int  # least columns of A in a split of K: fewer do not pay for a program
    block_k: int  # columns of A at a time
    shrink_stages: int
    shrink_warps: int
    range: int  # columns of the output that a program takes, for which it adds up the partials once, at most
    fill: int  # one of as many programs has to have work, or ranges are narrower
    widest: int  # columns at a time, at most
    elements: int  # weights of B at a time
    in_flight: int  # partials read at a time
    expand_stages: int
    expand_warps: int
    expert_columns: int  # columns of experts' output that a program takes at a time; not measured on a GPU yet


DECODE_TILING = Tiling(512, 256, 3, 2, 1024, 2, 128, 4096, 2048, 3, 4, 256)
PROMPT_TILING = Tiling(2048, 128, 4, 4, 2048, 2, 128, 4096, 2048, 3, 8, 128)
"""Chosen on an H200 and an H100 with Llama-3-8B's shapes (`bench/results/gpu.md`)."""

MAX_SPLITS = 8
PROMPT_SPLIT_ROWS = 8192  # rows whose blocks fill a device without splits of K

TableRows = tuple[int, int, AdapterTable]  # rows ``[start, stop)`` take this adapter


class Choices(NamedTuple):
    """The experts that a step's rows have chosen, sorted by expert and within one by row, on the device."""

    experts: torch.Tensor  # ``[n]``, int64
    rows: torch.Tensor  # the row of each ``[n]``, int64
    firsts: torch.Tensor  # places of the work ``[n]``, int32, of which the first ``num_firsts`` ``[1]`` are written
    num_firsts: torch.Tensor


class LoraSpace:
    """Shared by every step's tables: the base's groups, all pages (``pool``) and the kernel's heights of row blocks."""

    def __init__(self, directory: GroupDirectory, pool: torch.Tensor, blocks: RowBlocks = RAGGED) -> None:
        self.directory = directory
        self.pool = pool
        self.blocks = blocks
        self._columns: dict[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], torch.Tensor] = {}

    def compile(self, num_tokens: int) -> None:
        """Compile the kernels of steps of up to ``num_tokens`` rows by launches without work: none waits for it later.

        Each group is launched in steps that decode and in steps with prompts, for each number of splits; a step's list
        of work has a kernel for each power of two of row blocks.
        """
        for block_rows in dict.fromkeys(self.blocks):
            by_splits: dict[int, StepTables] = {}
            for power in range(power_of_two(num_tokens).bit_length()):
                room = TableSizes(
                    num_blocks=1 << power, num_items=1, num_rows=1 << power, max_rank=16, max_planes=1, expert_rank=16
                )
                tables = StepTables(self, room, block_rows)
                tables.plan()
                by_splits[tables.max_splits] = tables
            for span in self.directory.groups.values():
                num_out = max(first + width for first, width in span.modules)
                x, out = (self.pool.new_zeros(block_rows, columns) for columns in (span.in_features, num_out))
                none = torch.zeros(block_rows, dtype=torch.int64, device=x.device)
                for tables in by_splits.values():
                    if span.num_experts:
                        tables.apply_experts(x, out, span, tables.find_experts(none, none, span, span))
                    else:
                        tables.apply(x, out, span)
                if not span.num_experts:
                    tables.apply_vectors(out, span)

    def columns(self, span: GroupSpan, width: int) -> torch.Tensor:
        """Return the group's output in blocks of ``width`` columns, none across two modules: ``[blocks, 4]``, int64.

        Each is: module, first column in it, its columns, its offset in the output.
        """
        return self._lists(span, (width,))[1:]

    def ranges(self, span: GroupSpan, widest: int) -> torch.Tensor:
        """Return such blocks of ``widest`` columns, of half as many, and so on, behind the lengths of the lists."""
        return self._lists(span, tuple([widest >> halvings for halvings in range(RANGE_WIDTHS)]))

    def _lists(self, span: GroupSpan, widths: tuple[int, ...]) -> torch.Tensor:
        """Return a line with the lengths of the lists, and the lists."""
        key = (span.modules, widths)
        if key not in self._columns:
            lists = [
                [
                    (number, first, num_columns, offset)
                    for number, (offset, num_columns) in enumerate(span.modules)
                    for first in range(0, num_columns, width)
                ]
                for width in widths
            ]
            lengths = [len(blocks) for blocks in lists] + [0] * (RANGE_WIDTHS - len(lists))
            # Copied when this returns, and not by a kernel: ``expand`` reads it without waiting for launches before.
            table = torch.tensor([lengths, *chain.from_iterable(lists)], dtype=torch.int64)
            self._columns[key] = table.to(self.pool.device)
        return self._columns[key]


class TableSizes(NamedTuple):
    """The size of a step's tables."""

    num_blocks: int
    num_items: int  # items of work in one group
    num_rows: int
    max_rank: int
    max_planes: int  # most column pieces of a stack of A
    expert_rank: int = 0  # most rows of an expert's A; 0 if no adapter changes experts

    def holds(self, other: TableSizes) -> bool:
        """Return whether tables of size ``other`` fit."""
        return self.union(other) == self

    def union(self, other: TableSizes) -> TableSizes:
        """Return the size that fits either."""
        return TableSizes(*map(max, self, other))


class StepTables:
    """A step's tables and scratch on the device, and the launches that use them.

    A row block has ``block_rows`` rows; 1 pads every row by itself.
    """

    def __init__(self, space: LoraSpace, room: TableSizes, block_rows: int) -> None:
        device, directory = space.pool.device, space.directory
        self._space = space
        self.room = room
        self._block_rows = block_rows
        self._tiling = PROMPT_TILING if block_rows == PROMPT_ROWS else DECODE_TILING
        # By the room: a captured graph keeps its splits. Of more rows than these the partials would be many.
        most = max(1, PROMPT_SPLIT_ROWS // room.num_rows) if block_rows == PROMPT_ROWS else MAX_SPLITS
        self.max_splits = min(MAX_SPLITS, power_of_two(most + 1) // 2)
        num_groups = len(directory.groups)
        is_pinned = device.type == "cuda"
        front = 1 + BLOCK_FIELDS * room.num_blocks
        # Even: kernels are compiled anew for a pointer that is aligned in another way.
        sizes = (front + front % 2, room.num_rows if directory.has_experts else 0)
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_pinned)
        self._step = torch.zeros_like(self._host, device=device)
        self._of_rows = self._step[sizes[0] :]  # the address of each row's adapter table, 0 of the base's
        self._items = torch.empty((num_groups, room.num_items, ITEM_FIELDS), dtype=torch.int64, device=device)
        self._sizes = torch.zeros((num_groups, 2), dtype=torch.int32, device=device)
        self._parts = torch.empty(
            (num_groups, room.num_blocks, directory.num_modules, PART_FIELDS), dtype=torch.int64, device=device
        )
        self._partials = torch.empty(
            (room.max_planes * self.max_splits, room.num_rows, room.max_rank), dtype=torch.float32, device=device
        )

    @classmethod
    def for_rows(cls, space: LoraSpace, rows: Sequence[TableRows]) -> StepTables:
        """Return tables just large enough for ``rows``, written and planned."""
        block_rows = space.blocks.suit(rows)
        tables = cls(space, measure(rows, block_rows), block_rows)
        assert tables.write(rows)
        tables.plan()
        return tables

    def write(self, rows: Sequence[TableRows]) -> bool:
        """Write the step's row blocks to the device, on the current stream; return False if they do not fit."""
        if rows and not self.room.holds(measure(rows, self._block_rows)):
            return False
        lines = [
            (first, min(self._block_rows, stop - first), table.address)
            for start, stop, table in rows
            for first in range(start, stop, self._block_rows)
        ]
        host = self._host.numpy()
        host[0] = len(lines)
        host[1 : 1 + BLOCK_FIELDS * len(lines)] = np.asarray(lines, dtype=np.int64).ravel()
        of_rows = host[len(host) - len(self._of_rows) :]
        of_rows[:] = 0
        for start, stop, table in rows if len(of_rows) else ():
            of_rows[start:stop] = table.address
        self._step.copy_(self._host, non_blocking=True)
        return True

    def plan(self) -> None:
        """List each group's work, on the device; needed after ``write``, and part of a captured graph."""
        from manylora.execution.kernels.triton import lora as triton_lora

        directory, blocks = self._space.directory, power_of_two(self.room.num_blocks)
        triton_lora.plan[(len(directory.groups),)](
            *(self._step, self._items, self._items.stride(0), self._sizes, directory.line),
            *(self._parts, self._parts.stride(0)),
            MODULES=directory.num_modules,
            PAD=self._block_rows == PADDED.decode,
            BLOCKS=blocks,
            TILES=max(1, 512 // blocks),
        )

    def apply(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        span: GroupSpan,
        between: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Add the LoRA of inputs ``x`` ``[rows, in]`` into ``out`` ``[rows, out]``, for one group.

        ``between``, of workers that share the adapters, gets the sums ``x A^T`` before they meet B.
        """
        assert x.stride(1) == 1 and out.stride(1) == 1, f"rows must be contiguous: {x.stride()}, {out.stride()}"
        assert x.dtype == self._space.pool.dtype == out.dtype
        splits = 1 if between is not None else self.num_splits(span)
        self._shrink(x, span, splits)
        if between is not None:
            planes = self.room.max_planes  # of one plane the rows of this step are adjacent
            between(self._partials[:1, : x.shape[0]] if planes == 1 else self._partials[:planes])
        self._expand(out, span, splits, is_behind_shrink=between is None)

    def num_splits(self, span: GroupSpan) -> int:
        """Return into how many sums a row's ``x A^T`` is divided: the same in every step of such tables."""
        return min(self.max_splits, power_of_two(span.in_features // self._tiling.split_columns))

    def _shrink(self, x: torch.Tensor, span: GroupSpan, splits: int) -> None:
        from manylora.execution.kernels.triton import lora as triton_lora

        tiling = self._tiling
        triton_lora.shrink[(-(-num_programs(x.device) // splits), splits)](
            *(x, x.stride(0), self._space.pool, self._items, self._items.stride(0), self._sizes),
            *(span.index, span.in_features, self._partials, self._partials.stride(1), self._partials.stride(0)),
            SPLITS=splits,
            BLOCK_M=max(16, self._block_rows),
            BLOCK_K=tiling.block_k * 2 // x.dtype.itemsize,
            ALIGN=self._space.directory.alignment,
            STAGES=tiling.shrink_stages,
            num_warps=tiling.shrink_warps,
            **_chain(is_chained(x.device)),
        )

    def _expand(self, out: torch.Tensor, span: GroupSpan, splits: int, *, is_behind_shrink: bool) -> None:
        from manylora.execution.kernels.triton import lora as triton_lora

        tiling, directory = self._tiling, self._space.directory
        ranges = self._space.ranges(span, tiling.range)
        triton_lora.expand[(num_programs(out.device),)](
            *(out, out.stride(0), self._space.pool, self._step, self._sizes, ranges, span.index),
            *(self._parts, self._parts.stride(0)),
            *(self._partials, self._partials.stride(1), self._partials.stride(0)),
            SPLITS=splits,
            BLOCK_M=max(16, self._block_rows),
            RANGE=tiling.range,
            FILL=tiling.fill,
            ELEMENTS=tiling.elements * 2 // out.dtype.itemsize,
            WIDEST=tiling.widest,
            IN_FLIGHT=tiling.in_flight,
            ALIGN=directory.alignment,
            MODULES=directory.num_modules,
            STAGES=tiling.expand_stages,
            num_warps=tiling.expand_warps,
            **_chain(is_behind_shrink and is_chained(out.device)),
        )

    def find_experts(self, experts: torch.Tensor, rows: torch.Tensor, span: GroupSpan, other: GroupSpan) -> Choices:
        """List the work of sorted choices in the groups of a mixture's two weights; see ``Choices``."""
        from manylora.execution.kernels.triton import experts as triton_experts

        firsts = torch.empty(len(experts), dtype=torch.int32, device=experts.device)
        count = torch.zeros(1, dtype=torch.int32, device=experts.device)
        block_rows = max(16, self._block_rows)
        triton_experts.find_experts[(-(-len(experts) // block_rows),)](
            *(experts, rows, self._of_rows, len(self._of_rows), len(experts)),
            *(each.index * self._space.directory.line for each in (span, other)),
            *(firsts, count),
            BLOCK_M=block_rows,
            num_warps=4,
        )
        return Choices(experts, rows, firsts, count)

    def apply_experts(self, x: torch.Tensor, out: torch.Tensor, span: GroupSpan, choices: Choices) -> None:
        """Add the LoRA of inputs ``x`` ``[choices, in]`` into ``out`` ``[choices, out]``, for one group of experts."""
        from manylora.execution.kernels.triton import experts as triton_experts

        assert x.is_contiguous() and out.is_contiguous() and x.dtype == self._space.pool.dtype == out.dtype
        tiling, align = self._tiling, self._space.directory.alignment
        splits, block_rows = self.num_splits(span), max(16, self._block_rows)
        size = (self.room.max_planes * splits, len(x), self.room.expert_rank)
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
        sums = (partials, partials.stride(1), partials.stride(0))
        places = (
            *(choices.experts, choices.rows, self._of_rows, len(self._of_rows), len(x)),
            *(choices.firsts, choices.num_firsts, span.index * self._space.directory.line),
        )
        triton_experts.shrink_experts[(-(-num_programs(x.device) // splits), splits)](
            *(x, x.stride(0), self._space.pool, *places, span.in_features, *sums),
            SPLITS=splits,
            BLOCK_M=block_rows,
            BLOCK_K=tiling.block_k * 2 // x.dtype.itemsize,
            ALIGN=align,
            STAGES=tiling.shrink_stages,
            num_warps=4,
        )
        triton_experts.expand_experts[(num_programs(x.device),)](
            *(out, out.stride(0), self._space.pool, *places, out.shape[1], *sums),
            SPLITS=splits,
            BLOCK_M=block_rows,
            BLOCK_N=tiling.expert_columns * 2 // x.dtype.itemsize,
            IN_FLIGHT=tiling.in_flight,
            ALIGN=align,
            num_warps=4,
        )

    def apply_vectors(self, out: torch.Tensor, span: GroupSpan) -> None:
        """Multiply rows of ``out`` ``[rows, out]`` by their adapters' factors and add their shifts, in place."""
        from manylora.execution.kernels.triton import lora as triton_lora

        block_n, directory = 128, self._space.directory
        columns = self._space.columns(span, block_n)
        blocks = (columns, columns.shape[0])
        triton_lora.vectors[(num_programs(out.device),)](
            *(out, out.stride(0), self._space.pool, self._step, *blocks, span.index, directory.line),
            MODULES=directory.num_modules,
            BLOCK_M=max(16, self._block_rows),
            BLOCK_N=block_n,
            num_warps=16 if self._block_rows == PROMPT_ROWS else 8,  # fewer spill registers
        )


def _chain(is_early: bool) -> dict[str, bool]:
    """Return the options of a launch that may begin before the one before has ended, or of one that may not."""
    return {"IS_CHAINED": True, "launch_pdl": True} if is_early else {"IS_CHAINED": False}


class BatchTables:
    """The tables of one set of rows, in order; those on the device are made on first use."""

    def __init__(self, space: LoraSpace, rows: Sequence[TableRows]) -> None:
        self._space = space
        self._rows = rows
        self._present = np.zeros(len(space.directory.groups), dtype=np.bool_)
        self._with_vectors = np.zeros_like(self._present)
        for _, _, table in rows:
            self._present |= table.template.present
            self._with_vectors |= table.template.has_vectors

    def has_group(self, span: GroupSpan) -> bool:
        """Return whether any adapter of these rows changes the group."""
        return bool(self._present[span.index])

    def has_vectors(self, span: GroupSpan) -> bool:
        """Return whether any adapter of these rows has a factor or a shift in the group."""
        return bool(self._with_vectors[span.index])

    @cached_property
    def step(self) -> StepTables:
        """The tables on the device."""
        return StepTables.for_rows(self._space, self._rows)


def measure(rows: Sequence[TableRows], block_rows: int) -> TableSizes:
    """Return the size of the tables for a step of ``rows``."""
    blocks = [-(-(stop - start) // block_rows) for start, stop, _ in rows]
    tiles = [table.template.max_tiles for _, _, table in rows]
    if block_rows == 1:
        tiles = [max(tiles)] * len(tiles)
    return TableSizes(
        num_blocks=sum(blocks),
        num_items=sum(count * num_tiles for count, num_tiles in zip(blocks, tiles, strict=True)),
        num_rows=max(stop for _, stop, _ in rows),
        max_rank=max(table.template.max_rank for _, _, table in rows),
        max_planes=max(table.template.max_planes for _, _, table in rows),
        expert_rank=max(table.template.expert_rank for _, _, table in rows),
    )
