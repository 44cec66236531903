"""LoRA of a mixture's experts in Triton: one launch per half for every expert and adapter of a step.

The router decides on the device which experts a row takes, so no table of the host can name the work. A row's choices
are sorted by expert, and within one by row::

    position  0  1  2  3 | 4  5  6  7 | ...    blocks of BLOCK_M
    expert    0  0  0  0 | 2  2  3  3
    adapter   A  A  B  - | A  A  A  B
    firsts    ^     ^      ^     ^  ^          the first of each expert and adapter in its block

``find_experts`` lists the firsts, once for all weights of a mixture, in any order. A program that takes one computes
all choices of its expert and adapter in its block: weights are read once per block and pair, at true ranks. Programs
walk the list with a stride, so the grid has the size of the device, and a captured graph serves any mix. As in
``lora``, sums are made in the same order whatever else is in the batch.

Source:
    S-LoRA (arXiv:2311.03285), section 5, for gathering by table at true ranks. Kernels of others for experts pad each
    pair of expert and adapter to a block of rows, and all ranks to one, and make the list of blocks by a launch before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manylora.execution.kernels.triton.lora import TILE_ROWS, multiply_columns, sum_partials
from manylora.execution.storage.tile_tables import EXPERT_FIELDS, TILE_FIELDS

__all__ = ["expand_experts", "find_experts", "shrink_experts"]

_TILE_ROWS = tl.constexpr(TILE_ROWS)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_EXPERT_FIELDS = tl.constexpr(EXPERT_FIELDS)


# Numbers without meaning for alignment are not specialised: a compilation during serving is a pause.
@triton.jit(do_not_specialize=["num_rows", "num_positions", "line", "other_line"])
def find_experts(
    experts,
    rows,
    tables,
    num_rows,
    num_positions,
    line,
    other_line,
    firsts,
    count,
    BLOCK_M: tl.constexpr,
):
    """Write the first positions of block ``program_id(0)`` to ``firsts``, behind those that ``count`` has counted.

    Only those of adapters that change experts here: that have tiles by ``line`` or ``other_line`` of their header.
    """
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    numbers, addresses = _load_pairs(experts, rows, tables, num_rows, num_positions, places)
    header = addresses.to(tl.pointer_type(tl.int64))
    has_adapter = addresses != 0
    start = tl.load(header + line, mask=has_adapter, other=0)
    start += tl.load(header + other_line, mask=has_adapter, other=0)
    is_same = (numbers[:, None] == numbers[None, :]) & (addresses[:, None] == addresses[None, :])
    is_before = places[None, :] < places[:, None]
    is_first = (start > 0) & (tl.sum((is_same & is_before).to(tl.int32), 1) == 0)
    own = is_first.to(tl.int32)
    place = tl.atomic_add(count, tl.sum(own, 0)) + tl.cumsum(own, 0) - own
    tl.store(firsts + place, places, mask=is_first)


@triton.jit
def _load_pairs(experts, rows, tables, num_rows, num_positions, places):
    """Return the expert of each position, and the address of its adapter's table, 0 of the base's."""
    inside = places < num_positions
    numbers = tl.load(experts + places, mask=inside, other=-1)
    row = tl.load(rows + places, mask=inside, other=0)
    return numbers, tl.load(tables + row, mask=inside & (row < num_rows), other=0)  # the rows behind are the base's


@triton.jit
def _read_first(experts, rows, tables, num_rows, num_positions, position, line, BLOCK_M: tl.constexpr):
    """Return the positions of ``position``'s block, which of them have its expert and adapter, and their weights.

    That is the adapter's table, and its line of the expert: 0 if the adapter does not change these weights.
    """
    places = position // BLOCK_M * BLOCK_M + tl.arange(0, BLOCK_M)
    numbers, addresses = _load_pairs(experts, rows, tables, num_rows, num_positions, places)
    is_here = places == position
    expert = tl.sum(tl.where(is_here, numbers, 0), 0)
    address = tl.sum(tl.where(is_here, addresses, 0), 0)
    is_own = (numbers == expert) & (addresses == address)
    table = address.to(tl.pointer_type(tl.int64))
    start = tl.load(table + line)
    # In 64 bits: a prompt's output has many elements.
    return places.to(tl.int64), is_own, table, tl.where(start > 0, start + expert * _EXPERT_FIELDS, 0)


@triton.jit(do_not_specialize=["num_rows", "num_positions", "line", "in_features", "rank_stride", "split_stride"])
def shrink_experts(
    x,
    x_stride,
    pool,
    experts,
    rows,
    tables,
    num_rows,
    num_positions,
    firsts,
    count,
    line,
    in_features,
    partials,
    rank_stride,
    split_stride,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write ``x A^T`` of every position and split into ``partials`` ``[plane, split, position, rank]``.

    ``x`` ``[positions, in]`` is sorted as ``experts`` and ``rows`` ``[positions]``; ``tables`` ``[num_rows]`` has the
    address of each row's adapter.
    """
    split = tl.program_id(1)
    ranks = tl.arange(0, _TILE_ROWS)
    for item in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        places, is_own, table, own = _read_first(
            experts, rows, tables, num_rows, num_positions, tl.load(firsts + item), line, BLOCK_M
        )
        tile, num_tiles = table, 0
        if own > 0:
            tile += tl.load(table + own)
            num_tiles = tl.load(table + own + 1).to(tl.int32)
        for _ in range(num_tiles):
            first_rank, num_ranks = tl.load(tile + 1), tl.load(tile + 2)
            col, plane = 0, 0
            num_cols = in_features // ALIGN * ALIGN
            if ALIGN == 1:  # only then may a matrix be divided into ranges of columns
                col, num_cols, plane = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
            x_rows = x + places[:, None] * x_stride + col
            is_rank = (ranks < num_ranks)[None, :]
            w_rows = pool + tl.load(tile) // ALIGN * ALIGN + ranks[None, :] * num_cols
            share = tl.cdiv(tl.cdiv(num_cols, SPLITS), BLOCK_K) * BLOCK_K
            stop = tl.minimum(num_cols, (split + 1) * share)
            total = multiply_columns(
                x_rows, is_own[:, None], w_rows, is_rank, split * share, stop, BLOCK_M, BLOCK_K, STAGES
            )
            target = partials + (plane * SPLITS + split) * split_stride + places[:, None] * rank_stride
            tl.store(target + (first_rank + ranks)[None, :], total, mask=is_own[:, None] & is_rank)
            tile += _TILE_FIELDS


@triton.jit(do_not_specialize=["num_rows", "num_positions", "line", "rank_stride", "split_stride"])
def expand_experts(
    out,
    out_stride,
    pool,
    experts,
    rows,
    tables,
    num_rows,
    num_positions,
    firsts,
    count,
    line,
    num_columns,
    partials,
    rank_stride,
    split_stride,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Add ``shrunk B^T`` into ``out`` ``[positions, num_columns]``; the rest as in ``shrink_experts``."""
    num_blocks = tl.cdiv(num_columns, BLOCK_N)
    ranks = tl.arange(0, _TILE_ROWS)
    for item in range(tl.program_id(0), tl.load(count) * num_blocks, tl.num_programs(0)):
        places, is_own, table, own = _read_first(
            experts, rows, tables, num_rows, num_positions, tl.load(firsts + item // num_blocks), line, BLOCK_M
        )
        if own > 0:
            num_planes = tl.load(table + own + 2)
            tile = table + tl.load(table + own + 3)
            num_tiles = tl.load(table + own + 4).to(tl.int32)
            columns = item % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = columns < num_columns
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for _ in range(num_tiles):
                first_rank, is_rank = tl.load(tile + 1), ranks < tl.load(tile + 2)
                sums = partials + places[:, None] * rank_stride + (first_rank + ranks)[None, :]
                mask = is_own[:, None] & is_rank[None, :]
                shrunk = sum_partials(sums, mask, num_planes, split_stride, SPLITS, IN_FLIGHT)
                col, num_cols = 0, num_columns // ALIGN * ALIGN
                is_col = inside
                if ALIGN == 1:  # only then may a matrix be divided into ranges of columns
                    col, num_cols = tl.load(tile + 3), tl.load(tile + 4)
                    is_col = inside & (columns >= col) & (columns < col + num_cols)
                w_rows = pool + tl.load(tile) // ALIGN * ALIGN + ranks[:, None] * num_cols
                weights = tl.load(w_rows + (columns - col)[None, :], mask=is_rank[:, None] & is_col[None, :], other=0.0)
                total = tl.dot(shrunk.to(pool.dtype.element_ty), weights, total, input_precision="ieee")
                tile += _TILE_FIELDS
            target = out + places[:, None] * out_stride + columns[None, :]
            mask = is_own[:, None] & inside[None, :]
            before = tl.load(target, mask=mask, other=0.0)
            tl.store(target, (before + total).to(out.dtype.element_ty), mask=mask)
