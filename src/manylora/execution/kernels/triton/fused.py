"""Pieces of a decoder layer in one launch each, where plain torch takes several: norms, and gated activations."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "rms_norm"]


@triton.jit
def normalised(values, columns, inside, weight, eps, dtype: tl.constexpr, WIDTH: tl.constexpr, IS_OFFSET: tl.constexpr):
    """Return a row normalised, with the rounding of the original modules.

    Llama's rounds before it multiplies with the weight; Gemma's (``IS_OFFSET``) multiplies with one more than the
    weight and rounds once.
    """
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normal = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps))
    result = normal * (1.0 + factor)
    if not IS_OFFSET:
        result = normal.to(dtype).to(tl.float32) * factor
    return result.to(dtype)


@triton.jit
def rms_norm(
    x,
    x_stride,
    residual,
    residual_stride,
    inner_weight,
    inner_eps,
    weight,
    eps,
    total,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    IS_SUM: tl.constexpr,
    HAS_INNER: tl.constexpr,
):
    """Normalise row ``program_id(0)`` of ``x`` ``[rows, WIDTH]`` into ``out``, contiguous.

    With ``IS_SUM``, ``residual + x`` is normalised, and the sum is written to ``total``, contiguous. With
    ``HAS_INNER``, ``x`` is normalised by itself before it is added. Every operation rounds, as by itself.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = normalised(values, columns, inside, inner_weight, inner_eps, dtype, WIDTH, IS_OFFSET).to(tl.float32)
    if IS_SUM:
        values += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * WIDTH + columns, values.to(dtype), mask=inside)
        values = values.to(dtype).to(tl.float32)
    result = normalised(values, columns, inside, weight, eps, dtype, WIDTH, IS_OFFSET)
    tl.store(out + row * WIDTH + columns, result, mask=inside)


@triton.jit
def activate(gate, gate_stride, up, up_stride, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """Write ``act(gate) * up`` of a row and ``BLOCK`` columns to ``out`` ``[rows, WIDTH]``, contiguous.

    The activation is SiLU, or GELU by its tanh formula. It is rounded before it is multiplied, as by two operations.
    Exponents are never positive, so that none overflows.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # Both are x * sigmoid(z), since (1 + tanh(z / 2)) / 2 is the sigmoid of z.
    z = x
    if IS_GELU:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi)
    small = tl.exp(-tl.abs(z))
    active = x * tl.where(z >= 0, 1.0, small) / (1.0 + small)
    result = active.to(out.dtype.element_ty).to(tl.float32) * y
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)
