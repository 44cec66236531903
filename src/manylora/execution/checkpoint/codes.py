"""Weights as codes: small numbers with scales, as quantised checkpoints store them.

Every format is read into this one layout, which kernels take. A code takes a byte. Nothing is rounded that a
checkpoint has exactly: scales keep their type, and shifts, which are products of scales and integers, are float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["MIDDLES", "Codes", "find_problem", "make_codes", "spread", "unpack_nibbles", "unpack_words"]

MIDDLES: Mapping[str, int] = {"int8": 128, "int4": 8}  # the code of zero, by the kind of integer

_FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}

_FIRST_NO_NUMBER = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
"""The least code, without its sign, that is infinite or no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A quantised weight ``w``.

    ``w[o, order[i]] = scales[o, i // group] * number(codes[o, i]) + shifts[o, i // group]``, with a shift of 0 where
    ``shifts`` is ``None``, and column ``i`` of input ``i`` where ``order`` is ``None``.
    """

    # The number of a code: ``int8`` (code - 128), ``int4`` (code - 8), ``float8_e4m3fn`` or ``float8_e5m2`` (the code's
    # bits), ``table4`` (``table[code]``).
    numbers: str
    codes: torch.Tensor  # ``[out, in]``, uint8, one code a byte
    group: int  # consecutive columns that share a scale; ``in`` for one scale per output
    scales: torch.Tensor  # ``[out, ceil(in / group)]``, float32, float16 or bfloat16, as stored
    shifts: torch.Tensor | None = None  # ``[out, ceil(in / group)]``, float32: zero points times ``-scales``, or minima
    table: torch.Tensor | None = None  # ``[16]``, float32, for ``table4``
    # ``[in]``, int64: the input that a column belongs to, where columns are sorted so that groups are consecutive
    # (GPTQ's activation order).
    order: torch.Tensor | None = None

    def dequantise(self) -> torch.Tensor:
        """Return the weight, ``[out, in]``, float32, by its definition; the reference for kernels."""
        if self.table is not None:
            weight = self.table[self.codes.long()]
        elif (float8 := _FLOAT8.get(self.numbers)) is not None:
            weight = self.codes.view(float8).float()
        else:
            weight = self.codes.float() - MIDDLES[self.numbers]
        groups = torch.arange(weight.shape[1]) // self.group
        weight *= self.scales.float()[:, groups]
        if self.shifts is not None:
            weight += self.shifts[:, groups]
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)


def make_codes(
    numbers: str, codes: torch.Tensor, scales: torch.Tensor, group: int, zeros: torch.Tensor | None = None
) -> Codes:
    """Return integer or float codes, with zero points as shifts.

    Args:
        numbers: Any kind but ``table4``.
        codes: ``[out, in]``, uint8.
        scales: ``[out, ceil(in / group)]``.
        group: Columns that share a scale.
        zeros: The number that stands for a weight of 0, in the shape of ``scales`` and any type; shifts are left out
            where all are 0.
    """
    shifts = None if zeros is None or not zeros.any() else -(scales.float() * zeros.float())
    return Codes(numbers=numbers, codes=codes, group=group, scales=scales.contiguous(), shifts=shifts)


def find_problem(codes: Codes) -> str | None:
    """Return the reason why some weight of these codes would be infinite or no number; ``None`` if all are finite."""
    for name, values in (("scale", codes.scales), ("shift", codes.shifts), ("table", codes.table)):
        if values is not None and not (finite := values.isfinite()).all():
            place = [int(number) for number in (~finite).nonzero()[0]]
            return f"a {name} of {float(values[tuple(place)])} at {place}"
    first = _FIRST_NO_NUMBER.get(codes.numbers)
    if first is not None and (wrong := (codes.codes & 0x7F) >= first).any():
        place = [int(number) for number in wrong.nonzero()[0]]
        return f"the code 0x{int(codes.codes[tuple(place)]):02x} at {place}, which is no finite number"
    return None


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of 4 or 8 bits in int32 words, the lowest bits first: uint8 ``[..., words, 32 // bits]``."""
    octets = words.contiguous().unsqueeze(-1).view(torch.uint8)  # (..., words, 4)
    return octets if bits == 8 else unpack_nibbles(octets)


def unpack_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Split each byte along the last axis into two codes of 4 bits, the low bits first."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def spread(scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor | None:
    """Return scales of blocks of a weight as scales of each of its outputs.

    Args:
        scales: A number for each block, in rows of blocks. An axis with a single block may be left out.
        shape: Outputs and inputs of the weight.
        block: Outputs and inputs that share a scale; the last block of either may be smaller.

    Returns:
        ``[out, ceil(in / block[1])]``; ``None`` if there is another number of blocks.
    """
    rows, columns = (math.ceil(size / step) for size, step in zip(shape, block, strict=True))
    is_flat = scales.ndim < 2 and 1 in (rows, columns) and scales.numel() == rows * columns
    if not is_flat and scales.shape != (rows, columns):
        return None
    return scales.reshape(rows, columns).repeat_interleave(block[0], dim=0)[: shape[0]].contiguous()
