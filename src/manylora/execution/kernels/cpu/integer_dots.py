"""The innermost loop of products in 8-bit integers: weights of 8 or 4 bits times activations of 8 bits.

A tile of weights lies in memory as the processor's dot products read it: four consecutive inputs of one output are one
32-bit word, and the words of a tile's outputs follow one another::

    8 bits   | k 0-3 of output 0 | k 0-3 of output 1 | ... | k 0-3 of output 63 | k 4-7 of output 0 | ...
    4 bits   the same words; the low halves of their bytes are k 0-3, the high halves k 4-7

Sums over a block of ``BLOCK`` inputs are exact, in 32-bit integers; each is then multiplied by the scale of the weights
and that of the activations, and added in float32, block after block. So a row's results do not depend on the number of
rows beside it, nor on the processor.

Codes are unsigned and activations signed, as the instruction wants them (``vpdpbusd``, AVX-512 VNNI and AVX-VNNI); the
middle of the codes' range stands for zero: its part of a sum, the middle times the block's sum of activations, is what
the sum begins with. Processors without the instruction multiply pairs of 16 bits, with the same results.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from manylora.execution.kernels.cpu.forms import BLOCK, HALF_BLOCK, TILE
from manylora.execution.kernels.cpu.vectors import INT, LANES, VECTOR, address, row_addresses, spread, store, zero_sums

__all__ = ["HAS_INTEGER_DOTS", "MOST_ROWS", "dots_4", "dots_4_halved", "dots_8", "dots_8_halved"]

_FEATURES = llvmlite.binding.get_host_cpu_features()
HAS_INTEGER_DOTS = bool(_FEATURES.get("avx512vnni" if LANES == 16 else "avxvnni"))
"""Whether the processor multiplies four bytes at a time."""

MOST_ROWS = 4 if LANES == 16 else 2  # rows that are multiplied together: their integer sums stay in registers

_VECTORS = 4

_BYTE, _WORD, _HALF = ir.IntType(8), ir.IntType(32), ir.IntType(16)
_WORDS = ir.VectorType(_WORD, LANES)
_BYTES, _HALVES = ir.VectorType(_BYTE, 4 * LANES), ir.VectorType(_HALF, 4 * LANES)
_STEP = 4  # inputs in a word
_WORD_BYTES = TILE * _STEP  # of a tile's words of one step


def _dot(builder: Any, sums: Any, codes: Any, activations: Any) -> Any:
    """Return ``sums`` plus, in each 32-bit lane, four unsigned bytes of ``codes`` times four signed ``activations``."""
    if HAS_INTEGER_DOTS:
        bits = 32 * LANES
        kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS, _WORDS])
        multiply = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.vpdpbusd.{bits}")
        return builder.call(multiply, [sums, codes, activations])
    # 255 * 127 fits 16 bits with a sign; so do no two of them together, hence pairs are added in 32 bits.
    wide = builder.zext(builder.bitcast(codes, _BYTES), _HALVES)
    signed = builder.sext(builder.bitcast(activations, _BYTES), _HALVES)
    products = builder.mul(wide, signed)
    for part in range(_STEP):
        picked = ir.Constant(ir.VectorType(_WORD, LANES), [_STEP * lane + part for lane in range(LANES)])
        quarter = builder.shuffle_vector(products, ir.Constant(_HALVES, ir.Undefined), picked)
        sums = builder.add(sums, builder.sext(quarter, _WORDS))
    return sums


def _spread_word(builder: Any, word: Any) -> Any:
    nothing = ir.Constant(_WORDS, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, word, _WORD(0)), nothing, ir.Constant(_WORDS, 0))


def _load(builder: Any, pointer: Any, at: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer()), align=align)


def _words(builder: Any, tile: Any, step: int, start: int, bits: int) -> list[Any]:
    """Return the codes of one step, of ``_VECTORS`` vectors of outputs from ``start`` on, as bytes."""
    words = []
    for vector in range(_VECTORS):
        at = (step * bits // 8) * _WORD_BYTES + _STEP * (start + vector * LANES)
        word = _load(builder, tile, INT(at), _WORDS, 1)
        if bits == 4:
            if step % 2:
                word = builder.lshr(word, ir.Constant(_WORDS, [4] * LANES))
            word = builder.and_(word, ir.Constant(_WORDS, [0x0F0F0F0F] * LANES))
        words.append(word)
    return words


def _add_block(builder: Any, totals: Any, scales: Any, row_scales: Any, number: Any, sums: Any) -> None:
    """Add integer ``totals`` of a block, by row and vector, to ``sums``, each times the scales of both sides."""
    kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR])
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    factors = [_load(builder, scales, INT(vector * LANES), VECTOR, 4) for vector in range(_VECTORS)]
    for own_totals, own_sums, place in zip(totals, sums, row_scales, strict=True):
        scale = spread(builder, builder.load(builder.gep(place, [number])))
        for total, factor, own_sum in zip(own_totals, factors, own_sums, strict=True):
            product, real = builder.fmul(factor, scale), builder.sitofp(total, VECTOR)
            builder.store(builder.call(fused, [real, product, builder.load(own_sum)]), own_sum)


def _make_dots(bits: int, block: int = BLOCK) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def dots(
        typing_context: Any,
        num_rows: Any,
        codes: Any,
        codes_at: Any,
        scales: Any,
        activations: Any,
        row: Any,
        num_blocks: Any,
        row_scales: Any,
        row_sums: Any,
        out: Any,
    ) -> Any:
        """Write products of rows ``[row, row + num_rows)`` with a tile to ``out`` ``[num_rows, TILE]``.

        There are 1, 2 or 4 rows. ``codes`` (uint8) from ``codes_at`` on are the tile; ``scales`` ``[num_blocks,
        TILE]``, float32, are its. Of the rows, ``activations`` ``[rows, num_blocks * block]`` are int8, ``row_scales``
        and ``row_sums`` ``[rows, num_blocks]`` float32 and int32: the scale of a block, and its share of a sum for the
        middle of the codes.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for count in (1, 2, 4):
                with builder.if_then(builder.icmp_signed("==", args[0], INT(count))):
                    _write_dots(context, builder, signature.args, args, count, bits, block)
            return context.get_dummy_value()

        given = (codes, codes_at, scales, activations, row, num_blocks, row_scales, row_sums, out)
        return types.void(types.int64, *given), generate

    return dots


def _write_dots(context: Any, builder: Any, kinds: Any, args: Any, num_rows: int, bits: int, block: int) -> None:
    """Build the loop for a number of rows; ``args`` are the arguments of ``dots``, ``kinds`` their types."""
    codes_at, row, num_blocks = args[2], args[5], args[6]

    def place(argument: int, at: Any) -> Any:
        return address(context, builder, kinds[argument], args[argument], at)

    def rows_of(argument: int, stride: Any) -> list[Any]:
        array = kinds[argument], args[argument]
        return row_addresses(context, builder, *array, builder.mul(row, stride), stride, num_rows)

    inputs = rows_of(4, builder.mul(num_blocks, INT(block)))
    own_scales, own_sums = rows_of(7, num_blocks), rows_of(8, num_blocks)
    for start in range(0, TILE, _VECTORS * LANES):
        sums = [zero_sums(builder, _VECTORS) for _ in range(num_rows)]
        with cgutils.for_range(builder, num_blocks) as loop:
            number = loop.index
            tile = place(1, builder.add(codes_at, builder.mul(number, INT(block * TILE * bits // 8))))
            begin = [_spread_word(builder, builder.load(builder.gep(own, [number]))) for own in own_sums]
            totals = [[total] * _VECTORS for total in begin]
            for step in range(block // _STEP):
                words = _words(builder, tile, step, start, bits)
                at = builder.add(builder.mul(number, INT(block)), INT(_STEP * step))
                for r, own in enumerate(inputs):
                    four = _spread_word(builder, _load(builder, own, at, _WORD, 1))
                    totals[r] = [_dot(builder, *pair, four) for pair in zip(totals[r], words, strict=True)]
            factors = place(3, builder.add(builder.mul(number, INT(TILE)), INT(start)))
            _add_block(builder, totals, factors, own_scales, number, sums)
        for r, own in enumerate(sums):
            for vector, total in enumerate(own):
                store(builder, builder.load(total), place(9, INT(r * TILE + start)), INT(vector * LANES))


dots_8, dots_8_halved = _make_dots(8), _make_dots(8, HALF_BLOCK)
dots_4, dots_4_halved = _make_dots(4), _make_dots(4, HALF_BLOCK)
