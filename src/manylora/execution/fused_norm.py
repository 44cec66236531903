"""Normalisations as one launch each, by module replacement; whatever turns out not to be one stays as it is.

A decode step of a large model has two in every layer, of eight small kernels each in plain torch: with 32 layers some
five hundred launches, a fifth of a step on a fast GPU. Which modules they are is tried, not believed: a candidate is
run beside the original on random numbers and replaces it only if the results are equal but for rounding.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

__all__ = ["FusedNorm", "fuse_norms"]

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest relative difference that rounding explains."""


class FusedNorm(nn.Module):
    """A root-mean-square norm over the last dimension.

    Args:
        weight: ``[width]``; taken over.
        eps: Added to the mean square.
        is_offset: Whether the factor is one more than the weight (Gemma).
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, is_offset: bool) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._is_offset = is_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised, of the same shape and type."""
        from manylora.execution import triton_norm

        width = x.shape[-1]
        rows = x.reshape(-1, width)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        triton_norm.rms_norm[(rows.shape[0],)](
            rows,
            rows.stride(0),
            self.weight,
            out,
            self._eps,
            WIDTH=width,
            BLOCK=1 << (width - 1).bit_length(),
            IS_OFFSET=self._is_offset,
        )
        return out


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace every norm of ``model`` that is one; return how many.

    Args:
        model: Changed in place.
    """
    count = 0
    for name, module in list(model.named_modules()):
        if (fused := _fused(module)) is not None:
            model.set_submodule(name, fused)
            count += 1
    logger.info("norms_fused count=%d", count)
    return count


def _fused(module: nn.Module) -> FusedNorm | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or list(parameters) != ["weight"]:
        return None
    weight = parameters["weight"]
    if weight.ndim != 1 or weight.dtype not in _TOLERANCE:
        return None
    generator = torch.Generator().manual_seed(0)
    x = (4.0 * torch.randn(3, weight.shape[0], generator=generator)).to(weight.device, weight.dtype)
    expected = module(x)
    if expected.shape != x.shape or expected.dtype != x.dtype:
        return None
    scale = expected.abs().max().clamp(min=1e-6)
    for is_offset in (False, True):
        fused = FusedNorm(weight, eps, is_offset=is_offset)
        if float((fused(x).float() - expected.float()).abs().max() / scale) <= _TOLERANCE[weight.dtype]:
            return fused
    return None
