"""LoRA in Triton: every adapter of a step in one launch per half, true ranks, straight from the pages.

::

    plan     once per step    program g lists group g's work: one item per (row block, A tile), and where each row
                              block finds each module's B, so that ``expand`` reads it at once
    shrink   per group        item, K split -> partial sums [rows, 16] in float32, each to its own place
    expand   per group        row block x columns: add up the partials in a fixed order, times B, into the output
    vectors  per group        row block x columns: times the adapter's factor, plus its shift; only where a step has any

No atomics: sums are made in the same order every time, whatever else is in the batch. Programs walk the lists with a
stride, so the grid has the size of the device, and a captured graph serves any mix of adapters. Rows are padded to the
height of a matrix instruction (16), or to 64 where an adapter has prompts. That pads registers, not memory: weights are
read once per row block, and ranks are not padded.

``pad`` is the other published method, for comparison: every row by itself, every rank as large as the largest. It
repeats an adapter's last tile, which costs time; a padded copy of the weights would cost memory too.

Source:
    Punica (arXiv:2310.18547), section 4, for the padded method (BGMV) and the two halves; S-LoRA (arXiv:2311.03285),
    section 5, for the ragged one (MBGMV). We read 16-row tiles by table instead of slots, keep the partials of a split
    in float32 instead of adding atomically, and serve q, k, v (gate, up) in one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manylora.execution.storage.tile_tables import BLOCK_FIELDS, GROUP_FIELDS, PART_FIELDS, TILE_FIELDS

__all__ = ["ITEM_TILES", "TILE_ROWS", "expand", "plan", "shrink", "vectors"]

TILE_ROWS = 16  # rows of a tile at most: ``adapters.layout.MAX_TILE_ROWS``
ITEM_TILES = 4096  # an item of work is ``row block * ITEM_TILES + tile``

_TILE_ROWS = tl.constexpr(TILE_ROWS)
_ITEM_TILES = tl.constexpr(ITEM_TILES)
_GROUP_FIELDS = tl.constexpr(GROUP_FIELDS)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_BLOCK_FIELDS = tl.constexpr(BLOCK_FIELDS)
_PART_FIELDS = tl.constexpr(PART_FIELDS)


# Numbers without meaning for alignment are not specialised: a compilation during serving is a pause.
@triton.jit(do_not_specialize=["work_stride", "line", "part_stride"])
def plan(
    step,
    work,
    work_stride,
    sizes,
    line,
    parts,
    part_stride,
    MODULES: tl.constexpr,
    PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """List group ``program_id(0)``'s work; write its number of items, and of tiles to pad to, to ``sizes[group]``.

    ``parts`` ``[groups, row blocks, modules, PART_FIELDS]`` gets the places of B.
    """
    group = tl.program_id(0)
    num_blocks = tl.load(step)
    index = tl.arange(0, BLOCKS)
    inside = index < num_blocks
    address = tl.load(step + 1 + index * _BLOCK_FIELDS + 2, mask=inside, other=0)
    header = address.to(tl.pointer_type(tl.int64)) + group * line
    own = tl.load(header + 1, mask=inside, other=0).to(tl.int32)
    counts = own
    padded = 0
    if PAD:
        counts = tl.where(own > 0, tl.max(own, 0), 0)
        for module in tl.static_range(MODULES):
            tiles = tl.load(header + _GROUP_FIELDS + 2 * module + 1, mask=inside, other=0)
            padded = tl.maximum(padded, tl.max(tiles, 0).to(tl.int32))
    starts = tl.cumsum(counts, 0) - counts
    for tile in range(tl.max(counts, 0)):
        item = index * _ITEM_TILES + tl.minimum(tile, own - 1)
        tl.store(work + group.to(tl.int64) * work_stride + starts + tile, item, mask=tile < counts)
    tl.store(sizes + 2 * group, tl.sum(counts, 0))
    tl.store(sizes + 2 * group + 1, padded)
    block = step + 1 + index * _BLOCK_FIELDS
    first_row, num_rows = tl.load(block, mask=inside, other=0), tl.load(block + 1, mask=inside, other=0)
    planes = tl.load(header + 2, mask=inside, other=0)
    for module in tl.static_range(MODULES):
        tiles = header + _GROUP_FIELDS + 2 * module
        first = address + tl.load(tiles, mask=inside, other=0) * 8
        part = parts + group.to(tl.int64) * part_stride + (index * MODULES + module) * _PART_FIELDS
        tl.store(part, first_row, mask=inside)
        tl.store(part + 1, num_rows, mask=inside)
        tl.store(part + 2, first, mask=inside)
        tl.store(part + 3, tl.load(tiles + 1, mask=inside, other=0), mask=inside)
        tl.store(part + 4, planes, mask=inside)


@triton.jit(do_not_specialize=["work_stride", "group", "line", "rank_stride", "split_stride"])
def shrink(
    x,
    x_stride,
    pool,
    step,
    work,
    work_stride,
    sizes,
    group,
    line,
    partials,
    rank_stride,
    split_stride,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write ``x A^T`` of every item and split into ``partials`` ``[plane, split, row, rank]``."""
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, _TILE_ROWS)
    for number in range(tl.program_id(0), tl.load(sizes + 2 * group), tl.num_programs(0)):
        item = tl.load(work + group * work_stride + number)
        block = step + 1 + (item // _ITEM_TILES) * _BLOCK_FIELDS
        first_row, num_rows = tl.load(block), tl.load(block + 1)
        table = tl.load(block + 2).to(tl.pointer_type(tl.int64))
        tile = table + tl.load(table + group * line) + (item % _ITEM_TILES) * _TILE_FIELDS
        weight = tl.multiple_of(tl.load(tile), ALIGN)
        first_rank, num_ranks = tl.load(tile + 1), tl.load(tile + 2)
        col = tl.multiple_of(tl.load(tile + 3), ALIGN)
        num_cols = tl.multiple_of(tl.load(tile + 4), ALIGN)
        plane = tl.load(tile + 5)

        x_rows = x + (first_row + rows)[:, None] * x_stride + col
        is_row = (rows < num_rows)[:, None]
        w_rows = pool + weight + ranks[None, :] * num_cols
        is_rank = (ranks < num_ranks)[None, :]
        share = tl.cdiv(tl.cdiv(num_cols, SPLITS), BLOCK_K) * BLOCK_K
        stop = tl.minimum(num_cols, (split + 1) * share)
        total = tl.zeros((BLOCK_M, _TILE_ROWS), tl.float32)
        for k in range(split * share, stop, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            inside = columns < stop
            activations = tl.load(x_rows + columns[None, :], mask=is_row & inside[None, :], other=0.0)
            weights = tl.load(w_rows + columns[:, None], mask=is_rank & inside[:, None], other=0.0)
            total = tl.dot(activations, weights, total, input_precision="ieee")
        target = partials + (plane * SPLITS + split) * split_stride + (first_row + rows)[:, None] * rank_stride
        tl.store(target + (first_rank + ranks)[None, :], total, mask=is_row & is_rank)


@triton.jit
def sum_partials(places, mask, num_planes, split_stride, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the sum of all planes and splits of ``x A^T`` at ``places``, always in the same order."""
    total = tl.zeros((BLOCK_M, _TILE_ROWS), tl.float32)
    for plane in range(num_planes):
        for split in tl.static_range(SPLITS):
            total += tl.load(places + (plane * SPLITS + split) * split_stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_column_blocks", "group", "part_stride", "rank_stride", "split_stride"])
def expand(
    out,
    out_stride,
    pool,
    step,
    sizes,
    columns,
    num_column_blocks,
    group,
    parts,
    part_stride,
    partials,
    rank_stride,
    split_stride,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    MODULES: tl.constexpr,
):
    """Add ``shrunk B^T`` into ``out``.

    ``columns`` lists blocks of its columns: (module, first column in it, columns of it, its place in ``out``), and
    ``parts`` is as by ``plan``.
    """
    rows, ranks = tl.arange(0, BLOCK_M), tl.arange(0, _TILE_ROWS)
    num_items = tl.load(step).to(tl.int32) * num_column_blocks
    num_padded = tl.load(sizes + 2 * group + 1)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place = columns + (number % num_column_blocks) * 4
        index = (number // num_column_blocks) * MODULES + tl.load(place)
        part = parts + group.to(tl.int64) * part_stride + index * _PART_FIELDS
        first_row, num_rows = tl.load(part), tl.load(part + 1)
        tiles = tl.load(part + 2).to(tl.pointer_type(tl.int64))
        num_tiles, num_planes = tl.load(part + 3).to(tl.int32), tl.load(part + 4)
        if num_tiles > 0:
            own_cols = tl.multiple_of(tl.load(place + 1), BLOCK_N) + tl.arange(0, BLOCK_N)
            width = tl.multiple_of(tl.load(place + 2), ALIGN)
            is_row, is_col = (rows < num_rows)[:, None], own_cols < width
            sums = partials + (first_row + rows)[:, None] * rank_stride
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for number_of_tile in range(tl.maximum(num_tiles, num_padded)):
                tile = tiles + tl.minimum(number_of_tile, num_tiles - 1) * _TILE_FIELDS
                weight = tl.multiple_of(tl.load(tile), ALIGN)
                first_rank, num_ranks = tl.load(tile + 1), tl.load(tile + 2)
                is_rank = (ranks < num_ranks) & (number_of_tile < num_tiles)
                places = sums + (first_rank + ranks)[None, :]
                shrunk = sum_partials(places, is_row & is_rank[None, :], num_planes, split_stride, SPLITS, BLOCK_M)
                w_rows = pool + weight + ranks[:, None] * width + own_cols[None, :]
                inside = is_col
                if ALIGN == 1:  # only then may a matrix be divided into ranges of columns
                    col, num_cols = tl.load(tile + 3), tl.load(tile + 4)
                    w_rows = pool + weight + ranks[:, None] * num_cols + (own_cols - col)[None, :]
                    inside = is_col & (own_cols >= col) & (own_cols < col + num_cols)
                weights = tl.load(w_rows, mask=is_rank[:, None] & inside[None, :], other=0.0)
                total = tl.dot(shrunk.to(weights.dtype), weights, total, input_precision="ieee")
            first_out = tl.multiple_of(tl.load(place + 3), ALIGN)
            target = out + (first_row + rows)[:, None] * out_stride + first_out + own_cols[None, :]
            mask = is_row & is_col[None, :]
            tl.store(target, (tl.load(target, mask=mask, other=0.0) + total).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_column_blocks", "group", "line"])
def vectors(
    out,
    out_stride,
    pool,
    step,
    columns,
    num_column_blocks,
    group,
    line,
    MODULES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Multiply rows of ``out`` by their adapters' factors and add their shifts; ``columns`` as in ``expand``."""
    rows = tl.arange(0, BLOCK_M)
    num_items = tl.load(step).to(tl.int32) * num_column_blocks
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = step + 1 + (number // num_column_blocks) * _BLOCK_FIELDS
        first_row, num_rows = tl.load(block), tl.load(block + 1)
        table = tl.load(block + 2).to(tl.pointer_type(tl.int64))
        place = columns + (number % num_column_blocks) * 4
        factor = table + group * line + _GROUP_FIELDS + 2 * (MODULES + tl.load(place))
        shift = factor + 2 * MODULES
        num_factors, num_shifts = tl.load(factor + 1).to(tl.int32), tl.load(shift + 1).to(tl.int32)
        if num_factors + num_shifts > 0:
            own_cols = tl.load(place + 1) + tl.arange(0, BLOCK_N)
            is_col = own_cols < tl.load(place + 2)
            target = out + (first_row + rows)[:, None] * out_stride + tl.load(place + 3) + own_cols[None, :]
            mask = (rows < num_rows)[:, None] & is_col[None, :]
            result = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            if num_factors > 0:
                result *= _vector(pool, table + tl.load(factor), num_factors, own_cols, is_col, BLOCK_N)[None, :]
            if num_shifts > 0:
                result += _vector(pool, table + tl.load(shift), num_shifts, own_cols, is_col, BLOCK_N)[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _vector(pool, tile, num_tiles, own_cols, is_col, BLOCK_N: tl.constexpr):
    """Return the numbers of a vector for some columns: float32 in pages of any type."""
    numbers = tl.zeros((BLOCK_N,), tl.float32)
    for _ in range(num_tiles):
        col, num_cols = tl.load(tile + 3), tl.load(tile + 4)
        inside = is_col & (own_cols >= col) & (own_cols < col + num_cols)
        place = (pool + tl.load(tile)).to(tl.pointer_type(tl.float32))
        numbers += tl.load(place + (own_cols - col), mask=inside, other=0.0)
        tile += _TILE_FIELDS
    return numbers
