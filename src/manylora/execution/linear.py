"""``x W^T + b``, by the quickest library that torch brings.

On the CPU torch sends float32 products to MKL, which on AMD processors leaves AVX-512 unused; oneDNN, which
torch also brings, does not (measured on a Zen 4 core: 240 against 110 GFLOP/s). Its call costs ten
microseconds more, so small products stay where they were. The operator is the one torch's own compiler emits
for linears; where a build lacks it or it answers wrongly, everything goes through ``functional.linear``.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

__all__ = ["linear"]

# Multiply-adds from which the quicker product outweighs the dearer call.
MIN_WORK = 1 << 20
MIN_ROWS = 2


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x W^T + b``.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
    """
    if (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and (num_rows := x.numel() // x.shape[-1]) >= MIN_ROWS
        and num_rows * weight.numel() >= MIN_WORK
        and has_onednn()
    ):
        return _onednn(x, weight, bias)
    return functional.linear(x, weight, bias)


@cache
def has_onednn() -> bool:
    """Return whether oneDNN's linear is there and gives what ``functional.linear`` gives."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x, weight = torch.linspace(-1, 1, 64).view(4, 16), torch.linspace(1, -2, 128).view(8, 16)
    try:
        found = _onednn(x, weight, None)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(found, functional.linear(x, weight), atol=1e-4)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product
