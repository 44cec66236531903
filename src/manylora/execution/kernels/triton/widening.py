"""Four codes to four numbers of 16 bits in a few instructions, as PTX for ``tl.inline_asm_elementwise``.

A code is put behind the exponent of a float, whose last bits are then its value, and the float's own value is taken
off: two codes at a time, exactly. Triton widens one number at a time, by three times as many instructions as a GPU
issues while memory brings 4-bit codes.

Source: Kim et al. (arXiv:2211.10017) and Marlin (arXiv:2408.11743), for integers in float16.
"""

from __future__ import annotations

from functools import cache

__all__ = ["widening_ptx"]

_PAIRS = ((0, "0x4140"), (1, "0x4342"))  # selectors of two bytes as the low halves of two words of 16 bits
_HIGH_PAIRS = ((0, "0x1404"), (1, "0x3424"))  # the same as the high halves

_INTEGERS = {
    # The upper byte of a float whose last bits count ones; what is taken off, twice.
    ("int4", "bfloat16"): ("0x43434343", "0xc308c308"),  # 128 + 8
    ("int4", "float16"): ("0x64646464", "0xe408e408"),  # 1024 + 8
    ("int8", "float16"): ("0x64646464", "0xe480e480"),  # 1024 + 128
}

_FLOATS = {
    # The distance between the places of the exponents' lowest bits, the bits that stay, and the ratio of the numbers.
    ("float8_e4m3fn", "bfloat16"): (4, "0x07f007f0", "0x7b807b80"),  # 2 ** 120
    ("float8_e4m3fn", "float16"): (1, "0x3f803f80", "0x5c005c00"),  # 2 ** 8
    ("float8_e5m2", "bfloat16"): (3, "0x0fe00fe0", "0x77807780"),  # 2 ** 112
    ("float8_e5m2", "float16"): (0, "0x7f007f00", "0x3c003c00"),  # 1
}


@cache
def widening_ptx(numbers: str, half: int, dtype: str) -> str:
    """Return instructions from a word of four bytes, ``$2``, to two words of two numbers, ``$0`` and ``$1``.

    Args:
        numbers: Kind of the codes.
        half: Of 4-bit codes, 0 for those in the low halves of bytes and 1 for the others.
        dtype: ``bfloat16`` or ``float16``.

    Returns:
        The text; empty for a kind that has none: tables, and numbers of 32 bits.
    """
    fma = f"fma.rn.{'bf16x2' if dtype == 'bfloat16' else 'f16x2'}"
    one = "0x3f803f80" if dtype == "bfloat16" else "0x3c003c00"
    lines: list[str]
    if (numbers, dtype) in _INTEGERS:
        upper, offset = _INTEGERS[numbers, dtype]
        lines = [f"mov.b32 u, {upper};", f"mov.b32 f, {one};", f"mov.b32 o, {offset};", "mov.b32 c, $2;"]
        if numbers == "int4":
            lines += ["shr.b32 c, c, 4;"] * half + ["and.b32 c, c, 0x0f0f0f0f;"]
        for out, pair in _PAIRS:
            lines += [f"prmt.b32 a, c, u, {pair};", f"{fma} ${out}, a, f, o;"]
    elif (numbers, dtype) == ("int8", "bfloat16"):
        # Seven bits fit: 128 + (code & 127), less 128 where the eighth is set, and 256 where it is not.
        lines = ["mov.b32 u, 0x43434343;", "mov.b32 v, 0xc3c3c3c3;", f"mov.b32 f, {one};"]
        lines += ["and.b32 c, $2, 0x7f7f7f7f;", "not.b32 d, $2;", "and.b32 d, d, 0x80808080;"]
        for out, pair in _PAIRS:
            lines += [f"prmt.b32 a, c, u, {pair};", f"prmt.b32 b, d, v, {pair};", f"{fma} ${out}, a, f, b;"]
    elif (numbers, dtype) in _FLOATS:
        shift, kept, ratio = _FLOATS[numbers, dtype]
        lines = ["mov.b32 z, 0;", f"mov.b32 f, {ratio};"]
        for out, pair in _HIGH_PAIRS:
            lines += [f"prmt.b32 a, $2, z, {pair};", "and.b32 b, a, 0x80008000;", f"shr.b32 a, a, {shift};"]
            lines += [f"and.b32 a, a, {kept};", "or.b32 a, a, b;", f"{fma} ${out}, a, f, z;"]
    else:
        return ""
    return "\n".join(("{", ".reg .b32 a, b, c, d, f, o, u, v, z;", *lines, "}"))
