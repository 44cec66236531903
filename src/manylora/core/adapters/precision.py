"""The dtype of an adapter's packed weights, which may differ from the base's.

On a CPU the base computes in float32, but a decode step is bound by reading adapters: half the bytes take half the
time and half the pages. Most checkpoints are 16-bit and lose nothing. ``auto`` is therefore the narrowest dtype that
holds every weight exactly, scale included, else float32. A scale that is not a power of two (as of rank-stabilised
LoRA) makes B inexact and keeps an adapter in float32; name the dtype to accept the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.method import ModuleWeights
from manylora.core.adapters.packed import scaled_b

__all__ = ["ADAPTER_DTYPES", "choose_dtype", "choose_dtype_unread", "exact_dtypes"]

ADAPTER_DTYPES = ("auto", "float32", "bfloat16", "float16")
"""The values of the option."""


def choose_dtype(weights: Sequence[ModuleWeights], asked: str) -> str:
    """Return the dtype for an adapter; ``asked`` is one of ``ADAPTER_DTYPES``, and all but ``auto`` are returned."""
    return asked if asked != "auto" else exact_dtypes(weights)[0]


def exact_dtypes(weights: Sequence[ModuleWeights]) -> list[str]:
    """Return the dtypes that hold every one of some weights exactly, the narrowest first; the last is float32."""
    narrow = [
        dtype
        for dtype, is_exact in _IS_EXACT.items()
        # B first: its scale makes it inexact more often than A.
        if all(is_exact(scaled_b(w)) for w in weights)
        and all(is_exact(w.a.as_float32()) for w in weights)
        and all(is_exact(w.column_scale.as_float32()) for w in weights if w.column_scale is not None)
    ]
    return [*narrow, "float32"]


def choose_dtype_unread(weights: Sequence[ModuleWeights], asked: str) -> str:
    """Return the dtype for an adapter whose weights were not read: by their stored types and scales alone.

    16-bit weights stay as they are stored if no scale makes B inexact: scales are powers of two, and in float16, where
    trained weights may be subnormal, at least 1. All others are kept in float32, also those that ``choose_dtype`` would
    find to be narrower.
    """
    if asked != "auto":
        return asked
    stored = {tensor.dtype for w in weights for tensor in w.tensors}
    if all(abs(math.frexp(w.scale)[0]) == 0.5 for w in weights):
        if stored == {"BF16"}:
            return "bfloat16"
        if stored == {"F16"} and all(abs(w.scale) >= 1.0 for w in weights):
            return "float16"
    return "float32"


def _is_bfloat16(values: NDArray[np.float32]) -> bool:
    return not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()


def _is_float16(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore", under="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


_IS_EXACT: Mapping[str, Callable[[NDArray[np.float32]], bool]] = {"bfloat16": _is_bfloat16, "float16": _is_float16}
