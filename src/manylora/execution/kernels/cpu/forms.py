"""The form of weights that are kept in 16, 8 or 4 bits on a CPU: the kinds of numbers, and the order of the bytes."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BFLOAT16",
    "BITS",
    "BLOCK",
    "E4M3",
    "FLOAT16",
    "HALF_BLOCK",
    "INT4",
    "INT8",
    "NUMBERS",
    "NUM_SIZES",
    "TABLE4",
    "TILE",
    "CodedForm",
    "NarrowForm",
]

TILE = 64  # outputs of a tile

BLOCK = 32
"""Inputs whose activations share a scale; half as many beside weights whose groups have ``HALF_BLOCK`` inputs."""

HALF_BLOCK = BLOCK // 2

NUMBERS = ("int8", "int4", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "table4")
"""Kinds of weights: steps (from code 128 or 8 as zero), floating point, and places in a table of 16 numbers."""

INT8, INT4, BFLOAT16, FLOAT16, E4M3, _E5M2, TABLE4 = range(len(NUMBERS))

BITS = dict(zip(NUMBERS, (8, 4, 16, 16, 8, 8, 4), strict=True))

_SCALE_DTYPES = ("float32", "bfloat16", "float16")

NUM_SIZES = 8  # numbers of ``NarrowForm.sizes``


class CodedForm(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of a weight are to be read, on a CPU or on a GPU."""

    num_out: int  # outputs
    num_in: int  # inputs
    numbers: str  # kind of the weights, of ``NUMBERS``
    group: int = 0  # inputs that share a scale, a multiple of 16; 0 for weights without scales
    scale_dtype: str = "float32"  # type of scales and shifts
    has_shift: bool = False  # whether a weight is ``scale number + shift``, or without a shift
    has_order: bool = False  # whether columns are sorted in another order than the inputs

    @property
    def num_groups(self) -> int:
        """Scales of an output."""
        return -(-self.num_in // self.group) if self.group else 0


class NarrowForm(CodedForm, frozen=True, kw_only=True, tag="tiles"):
    """A form on a CPU.

    The bytes are tiles of codes (``cpu.packing``), then scales ``[tiles, groups, TILE]``, shifts as many, a table and
    an order, each if there is one.
    """

    is_rounded: bool = False  # whether activations are rounded to 8 bits; integers only

    @property
    def block(self) -> int:
        """Inputs whose activations share a scale."""
        return HALF_BLOCK if self.group % BLOCK else BLOCK

    @property
    def sections(self) -> tuple[int, int, int, int, int]:
        """Bytes of the codes, the scales, the shifts, the table and the order."""
        tiles = -(-self.num_out // TILE)
        codes = tiles * TILE * (-(-self.num_in // BLOCK) * BLOCK) * BITS[self.numbers] // 8
        scales = tiles * TILE * self.num_groups * (4 if self.scale_dtype == "float32" else 2)
        table, order = 64 * (self.numbers == "table4"), 4 * self.num_in * self.has_order
        return codes, scales, scales * self.has_shift, table, order

    def sizes(self, num_rows: int) -> NDArray[np.int64]:
        """Return the numbers that the kernels read, for so many rows."""
        kind, dtype = NUMBERS.index(self.numbers), _SCALE_DTYPES.index(self.scale_dtype)
        block = self.block
        blocks = self.group // block
        return np.array((num_rows, self.num_in, self.num_out, kind, block, blocks, dtype, self.has_shift), np.int64)
