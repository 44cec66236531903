"""Weights of the base that are kept in 8 or 4 bits on a GPU: their bytes, and their products.

::

    write_rows(...)  -> RowForm, bytes        in the process that loads, on the CPU
    RowWeight(bytes, form).product(x)         in every process that maps those bytes

The bytes are codes row by row, then scales by group, so that neighbouring programs read neighbouring bytes::

    8 bits    | code 0 | code 1 | ...                                      a block is SPAN bytes
    4 bits    | code 0, code SPAN | code 1, code SPAN + 1 | ...            low half first; a block is SPAN bytes too

Up to ``MOST_FEW`` rows, codes are widened in registers (``triton.coded.multiply``): a product reads the codes and no
more. More rows would widen them again and again, and operations cost more than bytes: codes are then written out as
numbers, some outputs at a time, for cuBLAS. Activations are not rounded to 8 bits.

A row's result does not depend on the rows beside it, but on their number: up to each of those in ``FEW_SHAPES``, or
more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.execution.device import dtype_name
from manylora.execution.kernels.cpu.forms import CodedForm
from manylora.execution.kernels.triton.support import is_interpreted, num_programs, power_of_two
from manylora.execution.kernels.triton.widening import widening_ptx

__all__ = ["RowForm", "RowWeight", "write_rows"]

MOST_FEW = 128
"""Rows up to which codes are widened in registers.

At half the peak of the matrix units, 128 rows take 1.6 ps for a 4-bit weight on an A100-80 (312 TFLOPS, 2.04 TB/s) and
0.5 on an H100 (989, 3.35). To write it out in 16 bits takes 1.2 and 0.7, and the product then at least 1.0 and 0.6. So
the two are level at some 190 and 370 rows. Reckoned from data sheets, not measured: hence fewer.
"""

MOST_SPAN = 64
"""Most bytes of an output in a block: two sectors of memory, and inputs enough for four matrix instructions."""

SCRATCH_WEIGHTS = 2**25
"""Most weights that are written out at once: 64 MiB in 16 bits, and products large enough to fill a GPU."""

_FEW_SHAPES = ((16, (16, 64, 8, 2, 4)), (32, (32, 64, 8, 4, 4)), (64, (64, 64, 8, 4, 4)))
FEW_SHAPES = {
    1: (*_FEW_SHAPES, (MOST_FEW, (128, 64, 4, 4, 3))),
    2: (*_FEW_SHAPES, (MOST_FEW, (64, 128, 4, 8, 3))),  # 128 rows of a block would spill where there are shifts
}
"""By codes of a byte and by most rows: rows and outputs of a block, most splits, warps, stages. Chosen on an H100 with
Llama 3 8B's shapes, and on an H200 the number of programs: twice those that fill it."""

MIN_SPLIT_BLOCKS = 4  # least blocks in a split of the inputs: fewer do not pay for a program

_FOUR_BITS = ("int4", "table4")
_ALIGNMENT = 16


class RowForm(CodedForm, frozen=True, kw_only=True, tag="rows"):
    """A form on a GPU: its numbers have at most 8 bits, and scales.

    The bytes are codes ``[num_out, row_bytes]``, scales ``[groups, num_out]``, shifts as many, a table of float32 and
    an order of int32, each if there is one, each from a multiple of 16 on.
    """

    dtype: str  # type of activations

    @property
    def halves(self) -> int:
        """Codes of a byte."""
        return 2 if self.numbers in _FOUR_BITS else 1

    @property
    def span(self) -> int:
        """Inputs of a matrix product, all of one group, and bytes of a block; a power of two."""
        return math.gcd(self.group, MOST_SPAN)

    @property
    def num_blocks(self) -> int:
        """Blocks of an output."""
        return -(-self.num_in // (self.span * self.halves))

    @property
    def sections(self) -> tuple[int, int, int, int, int]:
        """Bytes of the codes, the scales, the shifts, the table and the order."""
        codes = self.num_out * self.num_blocks * self.span
        scales = self.num_out * self.num_groups * getattr(torch, self.scale_dtype).itemsize
        sizes = (
            codes,
            scales,
            scales * self.has_shift,
            64 * (self.numbers == "table4"),
            4 * self.num_in * self.has_order,
        )
        first, second, third, fourth, fifth = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        return first, second, third, fourth, fifth


class RowWeight:
    """A weight ``[out, in]`` over its bytes ``[num_bytes]``, uint8, which stay alive with it."""

    def __init__(self, data: torch.Tensor, form: RowForm) -> None:
        self.form = form
        self.data = data
        self.dtype: torch.dtype = getattr(torch, form.dtype)
        self.shape = torch.Size((form.num_out, form.num_in))
        self.device = data.device
        self.nbytes = data.nbytes
        codes, scales, shifts, table, order = torch.split(data, list(form.sections))
        scale_dtype = getattr(torch, form.scale_dtype)
        scales = scales.view(scale_dtype)
        # Kernels read no pointer of a part that is not there, and take the scales' in its place.
        self._pointers = (
            *(codes, form.num_blocks * form.span, scales),
            shifts.view(scale_dtype) if form.has_shift else scales,
            table.view(torch.float32) if form.numbers == "table4" else scales,
        )
        self._order = order.view(torch.int32)[: form.num_in] if form.has_order else None
        self._constants = {
            "NUMBERS": form.numbers,
            "GROUP": form.group,
            "SPAN": form.span,
            "HALVES": form.halves,
            "HAS_SHIFT": form.has_shift,
        }

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T`` for ``x`` ``[..., in]``, in the type of ``x``."""
        if self._order is not None:
            x = x.index_select(-1, self._order)
        rows = x.reshape(-1, self.form.num_in).contiguous()
        out = self._few(rows) if len(rows) <= MOST_FEW else self._many(rows)
        return out.view(*x.shape[:-1], self.form.num_out)

    def rows(self, outputs: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weights of some outputs ``[n]``, int64, as ``[n, in]``; by default in the type of activations."""
        # Triton launches on the thread's own device, and the threads that settle adapters have entered none.
        with torch.cuda.device_of(self.data):
            weights = self._written_out(len(outputs), dtype or self.dtype, chosen=outputs)
        return weights if self._order is None else torch.empty_like(weights).index_copy_(1, self._order.long(), weights)

    def _few(self, rows: torch.Tensor) -> torch.Tensor:
        from manylora.execution.kernels.triton import coded

        form, num_rows = self.form, len(rows)
        out = rows.new_empty(num_rows, form.num_out)
        if not num_rows:
            return out
        block_m, block_n, most_splits, num_warps, num_stages = next(
            own for most, own in FEW_SHAPES[form.halves] if num_rows <= most
        )
        low, high = "", ""
        if not is_interpreted() and torch.version.hip is None:  # PTX is NVIDIA's
            low, high = (widening_ptx(form.numbers, half, dtype_name(rows.dtype)) for half in range(2))
        num_programs_wide = -(-form.num_out // block_n)
        wanted = min(2 * num_programs(self.device) // num_programs_wide, form.num_blocks // MIN_SPLIT_BLOCKS)
        splits = min(most_splits, power_of_two(wanted))
        target = out if splits == 1 else out.new_empty((splits, *out.shape), dtype=torch.float32)
        coded.multiply[(num_programs_wide, -(-num_rows // block_m), splits)](
            *(rows, rows.stride(0), *self._pointers, target, num_rows, form.num_out, form.num_in),
            **self._constants,
            LOW=low,
            HIGH=high,
            SPLITS=splits,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=num_warps,
            num_stages=1 if form.numbers == "table4" else num_stages,  # more would copy numbers of a table ahead
        )
        if splits > 1:
            coded.add_splits[(-(-out.numel() // 1024),)](target, out, out.numel(), SPLITS=splits, BLOCK=1024)
        return out

    def _many(self, rows: torch.Tensor) -> torch.Tensor:
        form = self.form
        out = rows.new_empty(len(rows), form.num_out)
        step = max(64, SCRATCH_WEIGHTS // form.num_in // 64 * 64)
        for first in range(0, form.num_out, step):
            weights = self._written_out(min(step, form.num_out - first), rows.dtype, first)
            torch.mm(rows, weights.t(), out=out[:, first : first + len(weights)])
        return out

    def _written_out(
        self, num_rows: int, dtype: torch.dtype, first: int = 0, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the weights of ``num_rows`` outputs from ``first`` on, or of those ``chosen``, in their own order."""
        from manylora.execution.kernels.triton import coded

        form, block_n = self.form, 64
        out = torch.empty((num_rows, form.num_in), dtype=dtype, device=self.device)
        if num_rows:
            coded.dequantise[(-(-num_rows // block_n), form.num_blocks)](
                *(*self._pointers, out if chosen is None else chosen, out, first, num_rows, form.num_out, form.num_in),
                **self._constants,
                IS_CHOSEN=chosen is not None,
                BLOCK_N=block_n,
                num_warps=4,
            )
        return out


def write_rows(
    numbers: str,
    codes: torch.Tensor,
    *,
    group: int,
    scales: torch.Tensor,
    shifts: torch.Tensor | None,
    table: torch.Tensor | None,
    order: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[RowForm, NDArray[np.uint8]]:
    """Return the form and the bytes of a weight, as ``write_narrow`` does; ``dtype`` is the type of activations."""
    num_out, num_in = codes.shape
    form = RowForm(
        num_out=num_out,
        num_in=num_in,
        numbers=numbers,
        group=-(-num_in // (2 * MOST_SPAN)) * 2 * MOST_SPAN if group >= num_in else group,
        scale_dtype=dtype_name(scales.dtype),
        dtype=dtype_name(dtype),
        has_shift=shifts is not None,
        has_order=order is not None,
    )
    octets = torch.zeros(num_out, form.num_blocks * form.span * form.halves, dtype=torch.uint8)
    octets[:, :num_in] = codes
    if form.halves == 2:
        low, high = octets.view(num_out, form.num_blocks, 2, form.span).unbind(2)
        octets = low | (high << 4)
    parts: Sequence[torch.Tensor | None] = (
        octets,
        scales.t(),
        None if shifts is None else shifts.to(scales.dtype).t(),
        table,
        None if order is None else order.to(torch.int32),
    )
    data = np.zeros(sum(form.sections), np.uint8)
    for place, part in zip(np.split(data, np.cumsum(form.sections)[:-1]), parts, strict=True):
        if part is not None:
            content = part.contiguous().reshape(-1).view(torch.uint8).numpy()
            place[: content.size] = content
    return form, data
