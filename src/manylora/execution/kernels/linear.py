"""``x W^T + b`` by the fastest library that torch includes.

On the CPU torch sends float32 products to MKL, which leaves AVX-512 unused on AMD processors; oneDNN, which torch
includes too, does not (measured on a Zen 4 core: 240 against 110 GFLOP/s). Its call costs ten microseconds more, so
small products stay with MKL. oneDNN reads weights fastest in an order of its own: a weight that is *packed* once into
that order saves products of a few rows a third of their time, and those of many a tenth. The operators are those
that torch's compiler emits for linears. Where a build lacks them, or they are wrong, ``functional.linear`` is used.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch.nn import functional

__all__ = ["bound_caches", "has_onednn", "linear", "pack", "reorder"]

# Multiply-adds from which the faster product outweighs the slower call.
MIN_WORK = 1 << 20
MIN_ROWS = 2

# Weights from which this holds for a product of one row too.
MIN_PACKED = 1 << 18


CACHED_PRIMITIVES = 128
"""Compiled products that oneDNN keeps, and torch beside it: one for each number of rows and shape of a weight.

At 1024, the default, they take most of a gigabyte once steps of all sizes were seen. To make one again takes a fraction
of a millisecond, which the layers of a step share. Steps that decode rarely change their number of rows.
"""


def bound_caches(num_primitives: int = CACHED_PRIMITIVES) -> None:
    """Bound oneDNN's caches; before the first product, when their sizes are read. Bounds that are set stay."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(num_primitives))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x W^T + b`` for ``x`` ``[..., in]`` and ``weight`` ``[out, in]``, packed or not."""
    if weight.is_mkldnn:
        return _onednn(x, weight, bias)
    if (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and (num_rows := x.numel() // x.shape[-1]) >= MIN_ROWS
        and num_rows * weight.numel() >= MIN_WORK
        and has_onednn()
    ):
        return _onednn(x, weight, bias)
    return functional.linear(x, weight, bias)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return an opaque copy of ``weight`` ``[out, in]`` in the order that ``linear`` reads fastest.

    A weight that is small, not float32 or not on a CPU is returned unchanged.
    """
    is_worth_it = weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.numel() >= MIN_PACKED
    if not is_worth_it or not has_onednn():
        return weight
    return reorder(weight)


@torch.no_grad()
def reorder(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` packed, whatever its size.

    Raises:
        RuntimeError: This build of torch has no oneDNN.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


@cache
def has_onednn() -> bool:
    """Return whether oneDNN's linear exists and agrees with ``functional.linear``, packed and not."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.linspace(-1, 1, 64).view(4, 16), torch.linspace(1, -2, 128).view(8, 16)
    try:
        found = [_onednn(x, weight, None), _onednn(x, reorder(weight), None)]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return all(torch.allclose(product, functional.linear(x, weight), atol=1e-4) for product in found)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product
