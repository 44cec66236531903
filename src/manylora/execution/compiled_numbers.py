"""Numbers of 16 bits in compiled loops: widened to float32 in registers, exactly.

numba knows no bfloat16 and no float16 on a CPU, so arrays of their bits stand for them: uint16 for bfloat16, int16 for
float16. The loops are written once; the array's type chooses.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

__all__ = ["as_float32"]

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()


@intrinsic  # type: ignore[untyped-decorator]
def as_float32(typing_context: Any, value: Any) -> Any:
    """Return a float32, the bits of a bfloat16 (uint16) or those of a float16 (int16) as float32."""
    widen = {types.float32: _same, types.uint16: _from_bfloat16, types.int16: _from_float16}[value]
    return types.float32(value), lambda context, builder, signature, args: widen(builder, args[0])


def _same(builder: Any, value: Any) -> Any:
    return value


def _from_bfloat16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _WORD), _WORD(16)), _FLOAT)


def _from_float16(builder: Any, bits: Any) -> Any:
    """Move exponent and mantissa to where float32 has them and make up for its larger bias by a product.

    Not the processor's own instruction: where it lacks one, the compiler would call a function that is not there.
    Exact for every finite number, subnormal ones too; weights are checked to be finite.
    """
    word = builder.zext(bits, _WORD)
    magnitude = builder.bitcast(builder.shl(builder.and_(word, _WORD(0x7FFF)), _WORD(13)), _FLOAT)
    scaled = builder.bitcast(builder.fmul(magnitude, _FLOAT(2.0**112)), _WORD)
    sign = builder.shl(builder.and_(word, _WORD(0x8000)), _WORD(16))
    return builder.bitcast(builder.or_(scaled, sign), _FLOAT)
