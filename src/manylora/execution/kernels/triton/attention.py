"""Attention over pages in Triton, for prompts and decoding, and the write of K and V before it.

::

    store     one program per token     K, rotated, and V of the layer -> their slots in the pages
    attend    query block x KV head
              a query block is a few tokens of one sequence times the query heads that share a KV head,
              so that K and V are read once for all of them and decoding fills a matrix instruction's rows;
              a long context of one token is cut into several blocks
    combine   cut row x head            adds up its parts in a fixed order

A prompt's context is walked in two loops: tiles that every line of the block sees whole, without masks, and those at
its end. Pages' numbers are read a tile ahead of K and V.

Queries are rotated when they are read, keys before they are written: rotary positions cost no launch of their own, and
no rotated query is written.

Pages need not be contiguous: a sequence's table has the page of each position. Memory beyond a sequence's end is never
read, so a page's earlier content cannot reach a sum.

Source:
    FlashAttention-2 (arXiv:2307.08691) for the running softmax; Flash-Decoding (Dao et al., 2023) for the split of
    the context; vLLM's PagedAttention (arXiv:2309.06180) for the tables.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manylora.execution.kernels.triton.support import BLOCK_FIELDS

__all__ = ["attend", "combine", "store"]

_BLOCK_FIELDS = tl.constexpr(BLOCK_FIELDS)
_LOG2_E = tl.constexpr(1.4426950408889634)
"""Turns scores into exponents of two, which GPUs have an instruction for: the factor joins that of the scores."""


@triton.jit
def load_rotated(source, cos, sin, dims, mask, ROTARY: tl.constexpr):
    """Load heads ``source + dims`` where ``mask``; rotate dimension ``d < ROTARY`` with that ``ROTARY / 2`` away.

    ``source``, ``cos`` and ``sin`` are columns of pointers, one line per head; sums are rounded once.
    """
    x = tl.load(source + dims, mask=mask, other=0.0)
    if ROTARY > 0:
        turns = mask & (dims < ROTARY)
        partner = tl.load(source + (dims + ROTARY // 2) % ROTARY, mask=turns, other=0.0).to(tl.float32)
        partner = tl.where(dims < ROTARY // 2, -partner, partner)
        along = tl.load(cos + dims, mask=turns, other=1.0).to(tl.float32)
        across = tl.load(sin + dims, mask=turns, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * along + partner * across).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["layer"])
def store(
    key,
    value,
    cos,
    sin,
    angle_stride,
    slots,
    pool,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    page_stride,
    layer,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write a token's K ``[heads, tokens, DIM]`` and V ``[heads, tokens, VALUE_DIM]`` of a layer to its page.

    ``slots[token]`` is ``page * BLOCK_SIZE`` and the place there, below 0 for none. K is rotated by ``cos`` and ``sin``
    ``[tokens, ROTARY]``; with ``ROTARY`` 0 it is written unchanged.
    """
    token = tl.program_id(0).to(tl.int64)  # a long prompt's keys and values have many elements
    slot = tl.load(slots + token)
    if slot >= 0:
        heads, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
        value_dims = tl.arange(0, BLOCK_V)[None, :]
        mask = (heads < HEADS) & (dims < DIM)
        value_mask = (heads < HEADS) & (value_dims < VALUE_DIM)
        keys = key + heads * key_head_stride + token * key_token_stride
        values = value + heads * value_head_stride + token * value_token_stride
        angles = token * angle_stride
        place = slot % BLOCK_SIZE
        target = pool + slot // BLOCK_SIZE * page_stride + layer * (BLOCK_SIZE * HEADS * (DIM + VALUE_DIM))
        own = target + (place * HEADS + heads) * DIM + dims
        tl.store(own, load_rotated(keys, cos + angles, sin + angles, dims, mask, ROTARY), mask=mask)
        own = target + BLOCK_SIZE * HEADS * DIM + (place * HEADS + heads) * VALUE_DIM + value_dims
        tl.store(own, tl.load(values + value_dims, mask=value_mask), mask=value_mask)


@triton.jit
def first_sums(sinks, is_first, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the largest exponent and the sum of weights of each line before any position is seen.

    A sink is the first score of the first part: its weight is 1, and its value is 0.
    """
    highest = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks, mask=is_first, other=-1.0e30).to(tl.float32) * _LOG2_E
        total += tl.where(is_first, 1.0, 0.0)
    return highest, total


@triton.jit
def page_numbers(table, low, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the page of each position of a tile; positions from ``stop`` on have that of the last one."""
    return tl.load(table + tl.minimum(low + tl.arange(0, BLOCK_N), stop - 1) // BLOCK_SIZE)


@triton.jit
def load_vectors(source, dims, DIM: tl.constexpr):
    """Load a vector of ``DIM`` elements from each pointer of a column ``source``, zeros behind it."""
    return tl.load(source + dims) if dims.shape[1] == DIM else tl.load(source + dims, mask=dims < DIM, other=0.0)


@triton.jit
def attend_tile(q, state, low, pages, seen, scales, memory, SIZES, IS_WHOLE, HAS_WINDOW, HAS_SOFTCAP):
    """Add the positions from ``low`` on, in their ``pages``, to the largest exponent and the sums of each line.

    ``seen`` has the last position and the window of each line, and the end of the context. A tile that ``IS_WHOLE``
    needs none of it: every line sees all of its positions. In others, positions from the end on are read as the last
    one, and have no weight.
    """
    BLOCK_SIZE: tl.constexpr = SIZES[0]
    KV_HEADS: tl.constexpr = SIZES[1]
    DIM: tl.constexpr = SIZES[2]
    VALUE_DIM: tl.constexpr = SIZES[3]
    BLOCK_N: tl.constexpr = pages.shape[0]
    highest, total, mixed = state
    position, window, stop = seen
    scale, softcap = scales
    pool, page_stride, head = memory
    positions = low + tl.arange(0, BLOCK_N)
    if not IS_WHOLE:
        place = tl.minimum(positions, stop - 1) % BLOCK_SIZE
    elif BLOCK_N % BLOCK_SIZE == 0:  # the same in every tile: each begins with a page
        place = tl.arange(0, BLOCK_N) % BLOCK_SIZE
    else:
        place = positions % BLOCK_SIZE
    place = (place * KV_HEADS + head)[:, None]
    page = (pages.to(tl.int64) * page_stride)[:, None]
    keys = load_vectors(pool + place * DIM + page, tl.arange(0, q.shape[1])[None, :], DIM)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap)) + 1.0))
        scale = _LOG2_E
    if not IS_WHOLE:
        is_seen = (positions < stop)[None, :] & (positions[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (positions[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    total = total * rescale + tl.sum(weights, 1)
    source = pool + BLOCK_SIZE * KV_HEADS * DIM + place * VALUE_DIM + page
    values = load_vectors(source, tl.arange(0, mixed.shape[1])[None, :], VALUE_DIM)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * rescale[:, None], input_precision="ieee")
    return new_highest, total, mixed


@triton.jit(do_not_specialize=["layer", "table_stride", "window"])
def attend(
    query,
    query_head_stride,
    query_token_stride,
    cos,
    sin,
    angle_stride,
    pool,
    page_stride,
    layer,
    sinks,
    blocks,
    tables,
    table_stride,
    out,
    partials,
    sums,
    scaling,
    window,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_CUT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend a query block to its part of the context.

    ::

        query     [heads, tokens, DIM]
        cos       [tokens, ROTARY], and sin the same, rotate queries; with ROTARY 0 they are used unchanged
        pool      pages; in each, the layer's K [BLOCK_SIZE, KV heads, DIM], and V [BLOCK_SIZE, KV heads, VALUE_DIM]
        sinks     with HAS_SINKS, a score of each head that takes a share of the weights [heads]
        blocks    [blocks, 6], int64, see support.BLOCK_FIELDS; a block of no tokens is skipped
        tables    page of every BLOCK_SIZE positions [lines, width], int32
        out       [tokens, heads, VALUE_DIM]
        partials  with IS_CUT, of blocks that see a part of their token's context: not yet divided
                  [blocks, heads, VALUE_DIM], float32
        sums      with IS_CUT, the largest exponent of two and the sum of weights of those [blocks, heads, 2], float32
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    if IS_CUT:
        number, head = tl.program_id(0), tl.program_id(1)
    else:  # the first blocks, which have the longest contexts, of all heads first
        number, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    block = blocks + number * _BLOCK_FIELDS
    num_tokens = tl.load(block + 1)
    if num_tokens > 0:
        first_row, first_position = tl.load(block), tl.load(block + 2).to(tl.int32)
        table = tables + tl.load(block + 3) * table_stride
        start, stop = tl.load(block + 4).to(tl.int32), tl.load(block + 5).to(tl.int32)
        lines = tl.arange(0, BLOCK_M)
        token = lines // GROUP
        own_head = head * GROUP + lines % GROUP
        is_row = token < num_tokens
        dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        is_dim, is_value_dim = dims < DIM, value_dims < VALUE_DIM
        position = first_position + token
        own_row = (first_row + token)[:, None]
        source = query + own_head[:, None] * query_head_stride + own_row * query_token_stride
        angles = own_row * angle_stride
        q = load_rotated(source, cos + angles, sin + angles, dims[None, :], is_row[:, None] & is_dim[None, :], ROTARY)
        highest, total = first_sums(sinks + own_head, is_row & (start == 0), HAS_SINKS, BLOCK_M)
        length = first_position + num_tokens.to(tl.int32)
        first = start
        if HAS_WINDOW:
            first = tl.maximum(start, tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N)
        state = highest, total, tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        seen, scales = (position, window, stop), (scaling * _LOG2_E, softcap)
        SIZES: tl.constexpr = (BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM)
        memory = pool + layer * (BLOCK_SIZE * KV_HEADS * (DIM + VALUE_DIM)), page_stride, head
        whole = first
        if not IS_CUT and not HAS_WINDOW:  # tiles that every line sees: without masks, and page numbers a tile ahead
            whole = first + (first_position + 1 - first) // BLOCK_N * BLOCK_N
            next_pages = page_numbers(table, first, stop, BLOCK_SIZE, BLOCK_N)
            for low in range(first, whole, BLOCK_N):
                pages = next_pages
                next_pages = page_numbers(table, low + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N)
                state = attend_tile(q, state, low, pages, seen, scales, memory, SIZES, True, HAS_WINDOW, HAS_SOFTCAP)
        for low in range(whole, stop, BLOCK_N):
            pages = page_numbers(table, low, stop, BLOCK_SIZE, BLOCK_N)
            state = attend_tile(q, state, low, pages, seen, scales, memory, SIZES, False, HAS_WINDOW, HAS_SOFTCAP)
        highest, total, mixed = state
        mask = is_row[:, None] & is_value_dim[None, :]
        if IS_CUT:
            is_part = is_row & ((start > 0) | (stop < length))
            place = number.to(tl.int64) * HEADS + own_head
            tl.store(partials + place[:, None] * VALUE_DIM + value_dims[None, :], mixed, mask=mask & is_part[:, None])
            tl.store(sums + place * 2, highest, mask=is_part)
            tl.store(sums + place * 2 + 1, total, mask=is_part)
            mask = mask & (is_row & (is_part == 0))[:, None]
        target = out + (own_row * HEADS + own_head[:, None]) * VALUE_DIM + value_dims[None, :]
        tl.store(target, (mixed / tl.where(total > 0.0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine(partials, sums, merges, out, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Combine the parts of a row's attention, for one head.

    ``merges`` ``[rows, 3]`` has the row, its first part and the number of its parts; none is skipped.
    """
    merge = merges + tl.program_id(0) * 3
    head = tl.program_id(1)
    row, first, number = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    if number > 0:
        dims = tl.arange(0, BLOCK_D)
        is_dim = dims < DIM
        highest = tl.full([], -1.0e30, tl.float32)
        for part in range(first, first + number):
            highest = tl.maximum(highest, tl.load(sums + (part * HEADS + head) * 2))
        total = tl.full([], 0.0, tl.float32)
        mixed = tl.zeros((BLOCK_D,), tl.float32)
        for part in range(first, first + number):
            place = part * HEADS + head
            scale = tl.exp2(tl.load(sums + place * 2) - highest)
            total += tl.load(sums + place * 2 + 1) * scale
            mixed += tl.load(partials + place * DIM + dims, mask=is_dim, other=0.0) * scale
        target = out + (row * HEADS + head) * DIM + dims
        tl.store(target, (mixed / total).to(out.dtype.element_ty), mask=is_dim)
