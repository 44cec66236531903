"""The innermost loops of ``decoded`` and of scales: a tile's words of weights, widened to float32 in registers.

A word of 32 bits holds two, four or eight consecutive inputs of one output, and a tile's words of the same inputs
follow one another (``packing``). So a vector of words is widened by a shift, a mask and a conversion for each input,
and each result is a vector of outputs of one input, which is where products want it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from manylora.execution.kernels.cpu.forms import BFLOAT16, BITS, E4M3, FLOAT16, INT4, INT8, TABLE4, TILE
from manylora.execution.kernels.cpu.loops import WIDE_WIDTH
from manylora.execution.kernels.cpu.vectors import INT, LANES, VECTOR, address, by_type, load, prefetch, store, widen

__all__ = ["CHUNK", "widen_block", "widen_tile"]

CHUNK = 128  # inputs of a tile that are widened together: 32 KiB

AHEAD = 1024  # words between those that are widened and those that are prefetched

_WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


def _convert(context: Any, builder: Any, numbers: str, word: Any, place: int, table: Any) -> Any:
    """Return a vector of float32 from input ``place`` of a vector of words."""
    bits = BITS[numbers]
    # The first bit of the input in its word: of 4 bits, the low halves of all bytes come first.
    shift = bits * place if bits > 4 else 8 * (place % 4) + 4 * (place // 4)
    moved = builder.lshr(word, ir.Constant(_WORDS, [shift] * LANES)) if shift else word
    if bits == 16:
        kind = types.uint16 if numbers == "bfloat16" else types.int16
        return widen(builder, kind, builder.trunc(moved, _HALVES), LANES)
    own = builder.and_(moved, ir.Constant(_WORDS, [(1 << bits) - 1] * LANES))
    if numbers == "table4":
        vector = ir.Constant(VECTOR, ir.Undefined)
        for lane in range(LANES):
            at = builder.zext(builder.extract_element(own, INT(lane)), ir.IntType(64))
            vector = builder.insert_element(vector, builder.load(builder.gep(table, [at])), INT(lane))
        return vector
    if numbers in ("int8", "int4"):
        middle = ir.Constant(_WORDS, [1 << (bits - 1)] * LANES)
        return builder.sitofp(builder.sub(own, middle), VECTOR)
    # Exponent and mantissa go to their places in float32; a product corrects the exponent, of subnormal numbers too.
    up, bias = (20, 120) if numbers == "float8_e4m3fn" else (21, 112)
    magnitude = builder.shl(builder.and_(own, ir.Constant(_WORDS, [0x7F] * LANES)), ir.Constant(_WORDS, [up] * LANES))
    sign = builder.shl(builder.and_(own, ir.Constant(_WORDS, [0x80] * LANES)), ir.Constant(_WORDS, [24] * LANES))
    bits_of = builder.bitcast(builder.or_(magnitude, sign), VECTOR)
    return builder.fmul(bits_of, ir.Constant(VECTOR, [2.0**bias] * LANES))


def _make_widen(numbers: str, *, has_scale: bool = True, has_shift: bool = False) -> Any:
    per_word = 32 // BITS[numbers]

    @intrinsic  # type: ignore[untyped-decorator]
    def widen_words(
        typing_context: Any, words: Any, at: Any, size: Any, scales: Any, shifts: Any, table: Any, panel: Any
    ) -> Any:
        """Write ``size`` inputs of a tile, whose words are at ``at``, to ``panel`` ``[WIDE_PARTS, CHUNK, WIDE_WIDTH]``.

        ``scales`` and ``shifts`` are ``[TILE]`` each, ``table`` ``[16]``.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source = address(context, builder, signature.args[0], args[0], args[1])
            scales, shifts, table, panel = (
                address(context, builder, kind, array, INT(0))
                for kind, array in zip(signature.args[3:], args[3:], strict=True)
            )
            columns = [INT(column) for column in range(0, TILE, LANES)]
            factors = [load(builder, scales, column, types.float32) for column in columns] if has_scale else []
            added = [load(builder, shifts, column, types.float32) for column in columns] if has_shift else []
            with cgutils.for_range(builder, builder.udiv(args[2], INT(per_word))) as loop:
                row = builder.gep(source, [builder.mul(loop.index, INT(TILE))])
                begin = builder.mul(loop.index, INT(per_word * WIDE_WIDTH))
                for vector, column in enumerate(columns):
                    prefetch(builder, row, INT(AHEAD + vector * LANES))
                    word = builder.load(builder.bitcast(builder.gep(row, [column]), _WORDS.as_pointer()), align=4)
                    part, first = divmod(vector * LANES, WIDE_WIDTH)
                    for place in range(per_word):
                        value = _convert(context, builder, numbers, word, place, table)
                        value = builder.fmul(value, factors[vector]) if has_scale else value
                        value = builder.fadd(value, added[vector]) if has_shift else value
                        target = INT(part * CHUNK * WIDE_WIDTH + place * WIDE_WIDTH + first)
                        store(builder, value, panel, builder.add(begin, target))
            return context.get_dummy_value()

        return types.void(words, at, size, scales, shifts, table, panel), generate

    return widen_words


@intrinsic  # type: ignore[untyped-decorator]
def _widen_line(typing_context: Any, source: Any, at: Any, target: Any, target_at: Any) -> Any:
    """Write TILE numbers of ``source``, of float32 or the bits of 16, from ``at`` on to ``target``, float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        place = address(context, builder, kinds[0], args[0], args[1])
        line = address(context, builder, kinds[2], args[2], args[3])
        for column in range(0, TILE, LANES):
            store(builder, load(builder, place, INT(column), kinds[0].dtype), line, INT(column))
        return context.get_dummy_value()

    return types.void(source, at, target, target_at), generate


_bfloat16, _float16 = (_make_widen(one, has_scale=False) for one in ("bfloat16", "float16"))
_int8, _int4, _table4 = (_make_widen(one) for one in ("int8", "int4", "table4"))
_int8_shifted, _int4_shifted = (_make_widen(one, has_shift=True) for one in ("int8", "int4"))
_e4m3, _e5m2 = (_make_widen(one) for one in ("float8_e4m3fn", "float8_e5m2"))


@njit  # type: ignore[untyped-decorator]
def _widen_tile(source: Any, tile: int, num_groups: int, blocks_per_group: int, target: Any) -> None:
    """Write the scales (or shifts) of a tile's groups to ``target`` ``[num_blocks, TILE]``, one line for each block."""
    for block in range(target.shape[0] // TILE):
        _widen_line(source, (tile * num_groups + block // blocks_per_group) * TILE, target, block * TILE)


widen_tile = by_type(_widen_tile)


@njit  # type: ignore[untyped-decorator]
def widen_block(
    kind: int, has_shift: bool, words: Any, at: int, size: int, scales: Any, shifts: Any, table: Any, panel: Any
) -> None:
    """Write a block of ``size`` inputs of a tile to ``panel``; the other arguments are as in ``_make_widen``."""
    if kind == BFLOAT16:
        _bfloat16(words, at, size, scales, shifts, table, panel)
    elif kind == FLOAT16:
        _float16(words, at, size, scales, shifts, table, panel)
    elif kind == INT8 and has_shift:
        _int8_shifted(words, at, size, scales, shifts, table, panel)
    elif kind == INT8:
        _int8(words, at, size, scales, shifts, table, panel)
    elif kind == INT4 and has_shift:
        _int4_shifted(words, at, size, scales, shifts, table, panel)
    elif kind == INT4:
        _int4(words, at, size, scales, shifts, table, panel)
    elif kind == TABLE4:
        _table4(words, at, size, scales, shifts, table, panel)
    elif kind == E4M3:
        _e4m3(words, at, size, scales, shifts, table, panel)
    else:
        _e5m2(words, at, size, scales, shifts, table, panel)
