"""LoRA in Triton: every adapter of a step in one launch per half, true ranks, straight from the pages.

::

    plan     once per step    program g lists group g's work: one item per (row block, A tile), with the tile's place,
                              and where each row block finds each module's B, so that ``expand`` reads it at once
    shrink   per group        item, K split -> partial sums [rows, 16] in float32, each to its own place
    expand   per group        row block x range of columns: add up the partials in a fixed order, once, then multiply
                              by up to four tiles of B at a time, into the output; the fewer row blocks, the narrower
                              the ranges, since a program has only so many reads under way
    vectors  per group        row block x columns: times the adapter's factor, plus its shift; only where a step has any

On devices that allow it (``IS_CHAINED``; CUDA C++ Programming Guide, "Programmatic Dependent Launch") a launch begins
before the one before it has ended, and waits inside. ``shrink`` waits first, so that ``expand``, once all of ``shrink``
runs, may read everything but its sums: it finds its work, and waits for those. Each waits in all of its programs, with
work or without, so that what is launched behind may count on all that was launched before.

No atomics: sums are made in the same order every time, whatever else is in the batch. Programs walk the lists with a
stride, so the grid has the size of the device, and a captured graph serves any mix of adapters. Rows are padded to the
height of a matrix instruction (16), or to 64 where an adapter has prompts. That pads registers, not memory: weights are
read once per row block, and ranks are not padded. Both loops over weights have addresses known in advance, so that the
compiler keeps copies to shared memory under way.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from manylora.execution.storage.tile_tables import (
    BLOCK_FIELDS,
    GROUP_FIELDS,
    ITEM_FIELDS,
    PART_FIELDS,
    RANGE_WIDTHS,
    TILE_FIELDS,
)

__all__ = ["TILE_ROWS", "expand", "multiply_columns", "plan", "shrink", "sum_partials", "vectors"]

TILE_ROWS = 16  # rows of a tile at most: ``adapters.layout.MAX_TILE_ROWS``

_TILE_ROWS = tl.constexpr(TILE_ROWS)
_MOST_POWER = tl.constexpr(2)  # ``expand`` takes 4 tiles at a time: 64 ranks; of a higher rank one after another
_RANGE_WIDTHS = tl.constexpr(RANGE_WIDTHS)
_WIDEST_OVER_NARROWEST = tl.constexpr(1 << (RANGE_WIDTHS - 1))
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_GROUP_FIELDS = tl.constexpr(GROUP_FIELDS)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_BLOCK_FIELDS = tl.constexpr(BLOCK_FIELDS)
_PART_FIELDS = tl.constexpr(PART_FIELDS)


# Numbers without meaning for alignment are not specialised: a compilation during serving is a pause.
@triton.jit(do_not_specialize=["item_stride", "line", "part_stride"])
def plan(
    step,
    items,
    item_stride,
    sizes,
    line,
    parts,
    part_stride,
    MODULES: tl.constexpr,
    PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):
    """List group ``program_id(0)``'s work; write its number of items, and of tiles to pad to, to ``sizes[group]``.

    ``items`` ``[groups, items, ITEM_FIELDS]`` gets the tiles of A, ``parts`` ``[groups, row blocks, modules,
    PART_FIELDS]`` the places of B.
    """
    group = tl.program_id(0)
    num_blocks = tl.load(step)
    index = tl.arange(0, BLOCKS)
    inside = index < num_blocks
    block = step + 1 + index * _BLOCK_FIELDS
    first_row, num_rows = tl.load(block, mask=inside, other=0), tl.load(block + 1, mask=inside, other=0)
    address = tl.load(block + 2, mask=inside, other=0)
    header = address.to(tl.pointer_type(tl.int64)) + group * line
    own = tl.load(header + 1, mask=inside, other=0).to(tl.int32)
    counts, padded = own, 0
    if PAD:
        counts = tl.where(own > 0, tl.max(own, 0), 0)
        for module in tl.static_range(MODULES):
            tiles = tl.load(header + _GROUP_FIELDS + 2 * module + 1, mask=inside, other=0)
            padded = tl.maximum(padded, tl.max(tiles, 0).to(tl.int32))
    starts = tl.cumsum(counts, 0) - counts
    first_item = items + group.to(tl.int64) * item_stride + starts * _ITEM_FIELDS
    first_tile = address + tl.load(header, mask=inside, other=0) * 8
    rows = (first_row << 32) | (num_rows << 24)
    for first in range(0, tl.max(counts, 0), TILES):
        number = first + tl.arange(0, TILES)[None, :]
        is_item = number < counts[:, None]
        tile = first_tile[:, None] + tl.minimum(number, own[:, None] - 1) * (_TILE_FIELDS * 8)
        numbers = tile.to(tl.pointer_type(tl.int64))
        weight = tl.load(numbers, mask=is_item, other=0)
        ranks = (tl.load(numbers + 1, mask=is_item, other=0) << 5) | tl.load(numbers + 2, mask=is_item, other=0)
        item = first_item[:, None] + number * _ITEM_FIELDS
        tl.store(item, weight, mask=is_item)
        tl.store(item + 1, rows[:, None] | ranks, mask=is_item)
        tl.store(item + 2, tile, mask=is_item)
    tl.store(sizes + 2 * group, tl.sum(counts, 0))
    tl.store(sizes + 2 * group + 1, padded)
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


@triton.jit(do_not_specialize=["item_stride", "group", "in_features", "rank_stride", "split_stride"])
def shrink(
    x,
    x_stride,
    pool,
    items,
    item_stride,
    sizes,
    group,
    in_features,
    partials,
    rank_stride,
    split_stride,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Write ``x A^T`` of every item and split into ``partials`` ``[plane, split, row, rank]``."""
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()  # ``expand`` finds its work meanwhile, none of which is made here
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, _TILE_ROWS)
    first, step = tl.program_id(0), tl.num_programs(0)
    num_items = tl.load(sizes + 2 * group)
    group_items = items + group.to(tl.int64) * item_stride
    has_place = first * _ITEM_FIELDS < item_stride  # an item or not: not to wait for their number
    next_weight = tl.load(group_items + first * _ITEM_FIELDS, mask=has_place, other=0)
    next_place = tl.load(group_items + first * _ITEM_FIELDS + 1, mask=has_place, other=0)
    for number in range(first, num_items, step):
        weight, place = next_weight // ALIGN * ALIGN, next_place  # aligned: the compiler is told
        following = group_items + (number + step) * _ITEM_FIELDS  # read now, so that it is there when its turn comes
        next_weight = tl.load(following, mask=number + step < num_items, other=0)
        next_place = tl.load(following + 1, mask=number + step < num_items, other=0)
        first_row, num_rows = place >> 32, (place >> 24) & 0x7F
        first_rank, num_ranks = (place >> 5) & 0x7FFFF, place & 0x1F
        col, plane = 0, 0
        num_cols = in_features // ALIGN * ALIGN
        if ALIGN == 1:  # only then may a matrix be divided into ranges of columns
            tile = tl.load(group_items + number * _ITEM_FIELDS + 2).to(tl.pointer_type(tl.int64))
            col, num_cols, plane = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)

        x_rows = x + (first_row + rows)[:, None] * x_stride + col
        is_row = (rows < num_rows)[:, None]
        w_rows = pool + weight + ranks[None, :] * num_cols
        is_rank = (ranks < num_ranks)[None, :]
        share = tl.cdiv(tl.cdiv(num_cols, SPLITS), BLOCK_K) * BLOCK_K
        stop = tl.minimum(num_cols, (split + 1) * share)
        total = multiply_columns(x_rows, is_row, w_rows, is_rank, split * share, stop, BLOCK_M, BLOCK_K, STAGES)
        target = partials + (plane * SPLITS + split) * split_stride + (first_row + rows)[:, None] * rank_stride
        tl.store(target + (first_rank + ranks)[None, :], total, mask=is_row & is_rank)


@triton.jit
def multiply_columns(
    x_rows, is_row, w_rows, is_rank, first, stop, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):
    """Return the product of rows of ``x`` and of a tile of A over columns ``[first, stop)``: ``[BLOCK_M, 16]``."""
    total = tl.zeros((BLOCK_M, _TILE_ROWS), tl.float32)
    for k in tl.range(first, stop, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        inside = columns < stop
        activations = tl.load(x_rows + columns[None, :], mask=is_row & inside[None, :], other=0.0)
        weights = tl.load(w_rows + columns[:, None], mask=is_rank & inside[:, None], other=0.0)
        total = tl.dot(activations, weights, total, input_precision="ieee")
    return total


@triton.jit
def sum_partials(places, mask, num_planes, split_stride, SPLITS: tl.constexpr, IN_FLIGHT: tl.constexpr):
    """Return the sum of all planes and splits of ``x A^T`` at ``places``, always in the same order.

    ``IN_FLIGHT`` numbers are read at a time: more take registers that the products need.
    """
    total = tl.zeros(places.shape, tl.float32)
    TOGETHER: tl.constexpr = min(SPLITS, max(1, IN_FLIGHT // (places.shape[0] * places.shape[1])))
    for first in range(0, num_planes * SPLITS, TOGETHER):
        for number in tl.static_range(TOGETHER):
            total += tl.load(places + (first + number) * split_stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["group", "part_stride", "rank_stride", "split_stride"])
def expand(
    out,
    out_stride,
    pool,
    step,
    sizes,
    ranges,
    group,
    parts,
    part_stride,
    partials,
    rank_stride,
    split_stride,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANGE: tl.constexpr,
    FILL: tl.constexpr,
    ELEMENTS: tl.constexpr,
    WIDEST: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
    ALIGN: tl.constexpr,
    MODULES: tl.constexpr,
    STAGES: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Add ``shrunk B^T`` into ``out``.

    ``ranges`` lists ranges of columns (module, first column in it, columns of it, its place in ``out``), of ``RANGE``
    columns, of half as many and so on, behind the lengths of the lists; the widest of which every ``FILL``-th program
    has one are taken. A program reads ``ELEMENTS`` weights at a time: few columns of a high rank, at most ``WIDEST``.
    """
    NARROWEST: tl.constexpr = RANGE // _WIDEST_OVER_NARROWEST
    rows = tl.arange(0, BLOCK_M)
    num_blocks = tl.load(step).to(tl.int32)
    first_range, num_ranges, num_cols = _choose_ranges(ranges, num_blocks, RANGE, FILL)
    num_items = tl.where(tl.load(sizes + 2 * group) > 0, num_blocks * num_ranges, 0)
    num_padded = tl.load(sizes + 2 * group + 1)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place = ranges + (first_range + number % num_ranges) * 4
        index = (number // num_ranges) * MODULES + tl.load(place)
        part = parts + group.to(tl.int64) * part_stride + index * _PART_FIELDS
        first_row, num_rows = tl.load(part), tl.load(part + 1)
        num_tiles, num_planes = tl.load(part + 3).to(tl.int32), tl.load(part + 4)
        num_shown = tl.where(num_tiles > 0, tl.maximum(num_tiles, num_padded), 0)
        own_rows, is_row = (first_row + rows)[:, None], (rows < num_rows)[:, None]
        target = out + own_rows * out_stride + tl.multiple_of(tl.load(place + 3), ALIGN)
        sums = partials + own_rows * rank_stride
        first_col, width = tl.multiple_of(tl.load(place + 1), NARROWEST), tl.multiple_of(tl.load(place + 2), ALIGN)
        tiles = tl.load(part + 2).to(tl.pointer_type(tl.int64))
        for power in tl.static_range(_MOST_POWER + 1):
            most = 1 << power if power < _MOST_POWER else 1 << 30
            if (num_shown > (1 << power) // 2) & (num_shown <= most):
                for first in range(0, num_shown, 1 << power):
                    _add_columns(
                        *(target, pool, sums, is_row, tiles, first, num_tiles, num_shown, first_col, num_cols, width),
                        *(num_planes, split_stride, SPLITS, IN_FLIGHT, 1 << power),
                        *(min(NARROWEST, WIDEST, ELEMENTS // (_TILE_ROWS << power)), ALIGN, STAGES, IS_CHAINED),
                    )
    if IS_CHAINED:
        gdc_wait()  # programs without work too: what follows may count on all that was launched before


@triton.jit
def _choose_ranges(ranges, num_blocks, RANGE: tl.constexpr, FILL: tl.constexpr):
    """Return the first of the ranges that suit the step, in lines, their number and their columns."""
    first, number, num_cols = 1, tl.load(ranges).to(tl.int32), RANGE
    for narrower in tl.static_range(1, _RANGE_WIDTHS):
        is_few = num_blocks * number * FILL < tl.num_programs(0)
        first += tl.where(is_few, number, 0)
        number = tl.where(is_few, tl.load(ranges + narrower).to(tl.int32), number)
        num_cols = tl.where(is_few, num_cols // 2, num_cols)
    return first, number, num_cols


@triton.jit
def _add_columns(
    target,
    pool,
    sums,
    is_row,
    tiles,
    first_tile,
    num_tiles,
    num_shown,
    first_col,
    num_cols,
    width,
    num_planes,
    split_stride,
    SPLITS: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Add the product with ``TILES`` tiles of B into a range of columns."""
    place = tl.arange(0, TILES * _TILE_ROWS)
    number, rank = first_tile + place // _TILE_ROWS, place % _TILE_ROWS
    tile = tiles + tl.minimum(number, num_tiles - 1) * _TILE_FIELDS
    weight = tl.multiple_of(tl.load(tile), [ALIGN])
    is_rank = (number < num_shown) & (rank < tl.load(tile + 2))
    is_used = is_row & (is_rank & (number < num_tiles))[None, :]
    places = sums + (tl.load(tile + 1) + rank)[None, :]
    if IS_CHAINED:
        gdc_wait()  # for ``shrink``, and for the product of the base before it
    shrunk = sum_partials(places, is_used, num_planes, split_stride, SPLITS, IN_FLIGHT).to(pool.dtype.element_ty)
    w_rows = (pool + weight + rank * width)[:, None]
    if ALIGN == 1:  # only then may a matrix be divided into ranges of columns
        col, tile_cols = tl.load(tile + 3), tl.load(tile + 4)
        w_rows = (pool + weight + rank * tile_cols - col)[:, None]
    for k in tl.range(first_col, tl.minimum(first_col + num_cols, width), BLOCK_N, num_stages=STAGES):
        columns = (tl.multiple_of(k, BLOCK_N) + tl.arange(0, BLOCK_N))[None, :]
        inside = is_rank[:, None] & (columns < width)
        if ALIGN == 1:
            own = columns - col[:, None]
            inside = inside & (own >= 0) & (own < tile_cols[:, None])
        weights = tl.load(w_rows + columns, mask=inside, other=0.0)
        mask = is_row & (columns < width)
        before = tl.load(target + columns, mask=mask, other=0.0)
        total = tl.dot(shrunk, weights, input_precision="ieee")
        tl.store(target + columns, (before + total).to(target.dtype.element_ty), mask=mask)


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
