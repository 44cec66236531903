"""Products with weights of 8 and 4 bits in Triton: codes are widened in registers, activations stay as they are.

::

    multiply     block of outputs x block of rows x split of the inputs   few rows: codes are read once for all of them
    add_splits   block of sums                                            in a fixed order; only where inputs are split
    dequantise   block of outputs x block of inputs                       many rows: numbers for a product of cuBLAS

A code becomes a number of the activations' type, exactly (a number of a table is rounded to that type): two at a time
by instructions of ``widening``, which the interpreter does not have, or one at a time by ``widened``. Products of a
group's codes are summed in float32, then multiplied by the group's scale, so that no scaled weight is rounded. The
product is computed transposed: outputs fill the 64 rows of a matrix instruction, and a few tokens its columns.

Bytes of 4-bit codes hold code ``i`` of a block in the low half and code ``i + SPAN`` in the high half. Each half is
then a product of its own, and no number has to move between threads (``row_weight``).

Source: Marlin (arXiv:2408.11743) for the split of the inputs and for halves that need no exchange. It scales weights in
16 bits, and lays codes out for one kind of matrix instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_splits", "dequantise", "multiply"]


@triton.jit
def widened(codes, table, dtype: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the numbers of ``codes``, uint8, in ``dtype``: the definition, for types without a quicker way."""
    if NUMBERS == "table4":
        return tl.load(table + codes).to(dtype)
    elif NUMBERS == "float8_e5m2":
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif NUMBERS == "float8_e4m3fn":
        bits = codes.to(tl.int16)
        return (((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        zero: tl.constexpr = 128 if NUMBERS == "int8" else 8
        return (codes.to(tl.int32) - zero).to(tl.float32).to(dtype)


@triton.jit
def numbers_of_group(
    own, block, half, is_output, num_out, num_in, GROUP: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr
):
    """Return the scales or shifts of outputs for a half of a block of codes, float32."""
    # Behind the last group there are zeros to fill a block.
    group = tl.minimum((block * HALVES + half) * SPAN // GROUP, tl.cdiv(num_in, GROUP) - 1)
    return tl.load(own + group * num_out, mask=is_output, other=0.0).to(tl.float32)


@triton.jit
def _pair(own, block, is_output, num_out, num_in, GROUP: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr):
    """Return `numbers_of_group` of the first half of a block and of its last."""
    last = numbers_of_group(own, block, HALVES - 1, is_output, num_out, num_in, GROUP, SPAN, HALVES)
    if HALVES == 1 or GROUP % (SPAN * HALVES) == 0:
        return last, last
    return numbers_of_group(own, block, 0, is_output, num_out, num_in, GROUP, SPAN, HALVES), last


@triton.jit
def block_product(
    octets,
    own_rows,
    is_row,
    scales,
    shifts,
    table,
    block,
    num_in,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Return the products ``[outputs, rows]`` of a block of codes ``octets`` ``[outputs, SPAN]``, float32.

    ``scales`` and ``shifts`` are pairs: of the first half and of the last.
    """
    dtype: tl.constexpr = own_rows.dtype.element_ty
    total = tl.zeros((octets.shape[0], own_rows.shape[1]), tl.float32)
    part, sums = total, total
    for half in tl.static_range(HALVES):
        columns = (block * HALVES + half) * SPAN + tl.arange(0, SPAN)
        activations = tl.load(
            own_rows + columns[:, None], mask=is_row[None, :] & (columns < num_in)[:, None], other=0.0
        )
        if LOW == "":
            numbers = widened(octets if HALVES == 1 else (octets >> 4 * half) & 15, table, dtype, NUMBERS)
        else:
            numbers = tl.inline_asm_elementwise(
                LOW if half == 0 else HIGH, "=r,=r,r", [octets], own_rows.dtype.element_ty, is_pure=True, pack=4
            )
        part = tl.dot(numbers, activations, part, input_precision="ieee")
        if HAS_SHIFT:
            # As a product: a sum over a block's threads takes more instructions than all of its codes.
            ones = tl.full(octets.shape, 1.0, dtype)
            sums = tl.dot(ones, activations, sums, input_precision="ieee")
        if half == HALVES - 1 or GROUP % (SPAN * HALVES) != 0:
            total += part * scales[half + 2 - HALVES][:, None]
            if HAS_SHIFT:
                total += sums * shifts[half + 2 - HALVES][:, None]
            part, sums = tl.zeros_like(total), tl.zeros_like(total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,
    x_stride,
    codes,
    code_stride,
    scales,
    shifts,
    table,
    out,
    num_rows,
    num_out,
    num_in,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Multiply a block of outputs with a block of rows, over a split of the inputs.

    ::

        x       [num_rows, num_in], 16 bits or float32
        codes   [num_out, code_stride] bytes, whole blocks of SPAN bytes
        scales  [groups, num_out], and shifts if there are any
        out     [num_rows, num_out]; with splits [SPLITS, num_rows, num_out] in float32
        LOW     PTX of ``widening`` for whole bytes, or codes in their low halves; HIGH for those in high halves
    """
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_output, is_row = outputs < num_out, rows < num_rows
    own_codes = codes + outputs[:, None].to(tl.int64) * code_stride + tl.arange(0, SPAN)[None, :]
    own_rows, own_scales, own_shifts = x + rows[None, :] * x_stride, scales + outputs, shifts + outputs
    num_blocks = tl.cdiv(num_in, SPAN * HALVES)
    share = tl.cdiv(num_blocks, SPLITS)
    first, last = split * share, tl.minimum(num_blocks, (split + 1) * share)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Scales are read a block ahead: the compiler keeps only what matrix products read under way by itself.
    next_scales = _pair(own_scales, first, is_output, num_out, num_in, GROUP, SPAN, HALVES)
    next_shifts = (
        _pair(own_shifts, first, is_output, num_out, num_in, GROUP, SPAN, HALVES) if HAS_SHIFT else next_scales
    )
    for block in range(first, last):
        octets = tl.load(own_codes + block * SPAN, mask=is_output[:, None], other=0)
        own, shift = next_scales, next_shifts
        next_scales = _pair(own_scales, block + 1, is_output, num_out, num_in, GROUP, SPAN, HALVES)
        if HAS_SHIFT:
            next_shifts = _pair(own_shifts, block + 1, is_output, num_out, num_in, GROUP, SPAN, HALVES)
        total += block_product(
            *(octets, own_rows, is_row, own, shift, table, block, num_in),
            *(NUMBERS, GROUP, SPAN, HALVES, HAS_SHIFT, LOW, HIGH),
        )
    target = out + (split * num_rows + rows)[None, :].to(tl.int64) * num_out + outputs[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit
def add_splits(partials, out, num_sums, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up ``partials`` ``[SPLITS, num_sums]`` into ``out`` ``[num_sums]``, in their order."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_sums
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + split * num_sums + places, mask=inside, other=0.0)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "num_rows"])
def dequantise(
    codes,
    code_stride,
    scales,
    shifts,
    table,
    chosen,
    out,
    first,
    num_rows,
    num_out,
    num_in,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the weights of ``num_rows`` outputs to ``out`` ``[num_rows, num_in]``: from ``first`` on, or ``chosen``.

    Others as for ``multiply``; a weight is rounded once.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    is_row = rows < num_rows
    outputs = first + rows.to(tl.int64)
    if IS_CHOSEN:
        outputs = tl.load(chosen + rows, mask=is_row, other=0)
    spot = tl.arange(0, SPAN)[None, :]
    octets = tl.load(codes + outputs[:, None] * code_stride + block * SPAN + spot, mask=is_row[:, None], other=0)
    last_group = tl.cdiv(num_in, GROUP) - 1
    for half in tl.static_range(HALVES):
        start = (block * HALVES + half) * SPAN
        own = octets
        if HALVES == 2:
            own = octets & 15 if half == 0 else octets >> 4
        place = tl.minimum(start // GROUP, last_group) * num_out + outputs
        numbers = widened(own, table, tl.float32, NUMBERS)
        numbers *= tl.load(scales + place, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if HAS_SHIFT:
            numbers += tl.load(shifts + place, mask=is_row, other=0.0).to(tl.float32)[:, None]
        columns = start + spot
        target = out + rows[:, None].to(tl.int64) * num_in + columns
        tl.store(target, numbers.to(out.dtype.element_ty), mask=is_row[:, None] & (columns < num_in))
