"""Weights of the base that are kept in 16, 8 or 4 bits on a CPU: their bytes, and their products.

::

    write_narrow(...)  -> NarrowForm, bytes     in the process that loads
    NarrowWeight(bytes, form).product(x)        in every process that maps those bytes

The bytes are the same on every processor. Two kernels read them, and the form says which one:

* ``cpu.decoded`` widens weights to float32 and multiplies in float32: exact but for the rounding of sums.
* ``cpu.coded`` rounds activations to 8 bits (``is_rounded``) and multiplies integers.

With both, a row's result is the same to the bit whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.execution.device import dtype_name
from manylora.execution.kernels.cpu.forms import BITS, BLOCK, TILE, NarrowForm
from manylora.execution.kernels.cpu.support import find_compiled

__all__ = ["NarrowWeight", "write_narrow"]


class NarrowWeight:
    """A weight ``[out, in]`` over its bytes ``[num_bytes]``, uint8, which stay alive with it."""

    dtype = torch.float32  # of products; some models ask for a weight's type

    def __init__(self, data: torch.Tensor, form: NarrowForm) -> None:
        self.form = form
        self.data = data
        self.shape = torch.Size((form.num_out, form.num_in))
        self.device = data.device
        self.nbytes = data.nbytes
        self._codes, self._scales, self._shifts, table, order = torch.split(data, list(form.sections))
        self._table = table.view(torch.float32).numpy() if form.numbers == "table4" else np.zeros(16, np.float32)
        self._order = order.view(torch.int32) if form.has_order else None

        kernels = find_compiled()
        assert kernels is not None, "narrow weights are made where the kernels are"
        kernels.compile_narrow(is_rounded=form.is_rounded)
        self._decoded = kernels.decoded
        self._multiply = kernels.coded if form.is_rounded else kernels.decoded

    def product(self, x: torch.Tensor, *, is_exact: bool = False) -> torch.Tensor:
        """Return ``x W^T`` for ``x`` ``[..., in]``, float32; activations are not rounded if ``is_exact``."""
        if self._order is not None:
            x = x.index_select(-1, self._order)
        rows = x.reshape(-1, self.form.num_in).contiguous()
        multiply = self._decoded if is_exact else self._multiply
        out: torch.Tensor = multiply(rows, self.data.data_ptr(), self.form, self._table)
        return out.view(*x.shape[:-1], self.form.num_out)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs ``[n]``, int64, as float32 ``[n, in]``: the reference for the kernels."""
        form = self.form
        tile, lane = outputs // TILE, outputs % TILE
        per_word = 32 // BITS[form.numbers]
        words = self._codes.view(torch.int32).view(-1, -(-form.num_in // BLOCK) * BLOCK // per_word, TILE)
        own = words[tile, :, lane].contiguous().view(torch.uint8)
        if per_word == 8:
            own = own.view(len(outputs), -1, 1, 4)
            own = torch.cat((own & 15, own >> 4), dim=2)  # the low halves of a word's bytes come first
        own = own.reshape(len(outputs), -1)
        if form.numbers == "table4":
            weights = torch.from_numpy(self._table)[own.long()]
        elif form.numbers in ("int8", "int4"):
            weights = own.float() - 2.0 ** (BITS[form.numbers] - 1)
        else:
            weights = own.view(getattr(torch, form.numbers)).float()
        weights = weights[:, : form.num_in]
        for factors, combine in ((self._scales, torch.mul), (self._shifts, torch.add)):
            if factors.numel():
                numbers = factors.view(getattr(torch, form.scale_dtype)).view(-1, form.num_groups, TILE)[tile, :, lane]
                spread = numbers.float().repeat_interleave(form.group, dim=1)[:, : form.num_in]
                weights = combine(weights, spread)
        if self._order is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self._order.long(), weights)


def write_narrow(
    numbers: str,
    codes: torch.Tensor,
    *,
    group: int = 0,
    scales: torch.Tensor | None = None,
    shifts: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    is_rounded: bool = False,
) -> tuple[NarrowForm, NDArray[np.uint8]]:
    """Return the form and the bytes of a weight; for one thread, without the interpreter lock for the most part.

    Args:
        numbers: Kind of the weights, of ``NUMBERS``.
        codes: ``[out, in]``: uint8, one code a byte, or a tensor of 16 bits.
        group: Inputs that share a scale: all, or a multiple of ``HALF_BLOCK``; 0 for weights without scales.
        scales: ``[out, groups]``, float32, float16 or bfloat16.
        shifts: As many, of any type: they are rounded to that of the scales.
        table: ``[16]``, float32, for ``table4``.
        order: ``[in]``: the input of each column, if columns are sorted.
        is_rounded: Whether activations are to be rounded to 8 bits.
    """
    from manylora.execution.kernels.cpu.packing import pack_words, tile_groups

    num_out, num_in = codes.shape
    if group >= num_in:
        group = -(-num_in // BLOCK) * BLOCK
    form = NarrowForm(
        num_out=num_out,
        num_in=num_in,
        numbers=numbers,
        group=group,
        scale_dtype="float32" if scales is None else dtype_name(scales.dtype),
        has_shift=shifts is not None,
        has_order=order is not None,
        is_rounded=is_rounded,
    )
    sections = form.sections
    data = np.empty(sum(sections), np.uint8)
    parts = np.split(data, np.cumsum(sections)[:-1])
    bits = BITS[numbers]
    raw = codes.view(torch.int16).numpy().view(np.uint16) if bits == 16 else codes.numpy()
    pack_words(raw, bits, parts[0], {"int8": 128, "int4": 8}.get(numbers, 0))
    contents: Sequence[torch.Tensor | None] = (
        scales,
        None if shifts is None or scales is None else shifts.to(scales.dtype),
    )
    for part, content in zip(parts[1:3], contents, strict=True):
        if content is not None:
            width = content.element_size()
            plain = content.contiguous().view(torch.int16 if width == 2 else torch.int32).numpy()
            part[:] = tile_groups(plain).view(np.uint8)
    if table is not None:
        parts[3][:] = table.numpy().view(np.uint8)
    if order is not None:
        parts[4][:] = order.to(torch.int32).numpy().view(np.uint8)
    return form, data
