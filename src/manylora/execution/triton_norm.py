"""Root-mean-square normalisation in one launch, where plain torch takes eight, with the sum before it or without."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rms_norm"]


@triton.jit
def rms_norm(
    x,
    x_stride,
    residual,
    residual_stride,
    weight,
    total,
    out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    IS_SUM: tl.constexpr,
):
    """Normalise row ``program_id(0)`` of ``x`` ``[rows, WIDTH]`` into ``out``, contiguous.

    With ``IS_SUM`` it is ``residual + x`` that is normalised, and the sum is written to ``total``, contiguous.
    The rounding is that of the modules it stands in for: a sum is rounded before it is normalised, Llama's norm rounds
    before it multiplies with the weight, Gemma's (``IS_OFFSET``) multiplies with one more than the weight and rounds
    once.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_SUM:
        values += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normal = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps))
    result = normal * (1.0 + factor)
    if not IS_OFFSET:
        result = normal.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)
