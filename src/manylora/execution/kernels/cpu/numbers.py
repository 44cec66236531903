"""Numbers of 16 bits in compiled loops: widened to float32 in registers, exactly.

numba has no bfloat16 and no float16 on a CPU, so arrays hold their bits: as uint16 for bfloat16, as int16 for float16.
The loops are written once; the array's type selects the conversion.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

__all__ = ["as_float32", "widen"]


@intrinsic  # type: ignore[untyped-decorator]
def as_float32(typing_context: Any, value: Any) -> Any:
    """Return a float32, the bits of a bfloat16 (uint16) or those of a float16 (int16) as float32."""
    return types.float32(value), lambda context, builder, signature, args: widen(builder, value, args[0])


def widen(builder: Any, dtype: Any, bits: Any, lanes: int | None = None) -> Any:
    """Return ``bits`` of numba's type ``dtype`` as float32: ``lanes`` numbers in a vector, or one number."""
    word: Any = ir.IntType(32) if lanes is None else ir.VectorType(ir.IntType(32), lanes)
    real: Any = ir.FloatType() if lanes is None else ir.VectorType(ir.FloatType(), lanes)
    convert = {types.float32: _same, types.uint16: _from_bfloat16, types.int16: _from_float16}[dtype]
    return convert(builder, bits, word, real)


def _same(builder: Any, value: Any, word: Any, real: Any) -> Any:
    return value


def _from_bfloat16(builder: Any, bits: Any, word: Any, real: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, word), ir.Constant(word, 16)), real)


def _from_float16(builder: Any, bits: Any, word: Any, real: Any) -> Any:
    """Move exponent and mantissa to their places in float32 and correct the bias by a product.

    The processor's own instruction is not used: where it is missing, the compiler would call a function that does not
    exist. Exact for every finite number, subnormal ones too; weights are checked to be finite.
    """
    wide = builder.zext(bits, word)
    moved = builder.shl(builder.and_(wide, ir.Constant(word, 0x7FFF)), ir.Constant(word, 13))
    scaled = builder.fmul(builder.bitcast(moved, real), ir.Constant(real, 2.0**112))
    sign = builder.shl(builder.and_(wide, ir.Constant(word, 0x8000)), ir.Constant(word, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, word), sign), real)
