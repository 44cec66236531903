"""``x W^T + b``, by the quickest library that torch brings.

On the CPU torch sends float32 products to MKL, which on AMD processors leaves AVX-512 unused; oneDNN, which
torch also brings, does not (measured on a Zen 4 core: 240 against 110 GFLOP/s). Its call costs ten
microseconds more, so small products stay where they were. It reads weights fastest in an order of its own: a
weight that is *packed* into it once spares every product of a few rows a third of its time, and one of many rows a
tenth. The operators are those torch's own compiler emits for linears; where a build lacks them or they answer wrongly,
everything goes through ``functional.linear``.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

__all__ = ["has_onednn", "linear", "pack", "reorder"]

# Multiply-adds from which the quicker product outweighs the dearer call.
MIN_WORK = 1 << 20
MIN_ROWS = 2

# Weights from which even a product of one row is worth the dearer call.
MIN_PACKED = 1 << 18


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x W^T + b``.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, packed or not.
        bias: ``[out]`` or ``None``.
    """
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
    """Return ``weight`` ``[out, in]`` in the order ``linear`` reads fastest: an opaque copy, good for nothing else.

    What is small, not float32 or not on a CPU comes back as it is.
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
    """Return whether oneDNN's linear is there and gives what ``functional.linear`` gives, packed and not."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
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
