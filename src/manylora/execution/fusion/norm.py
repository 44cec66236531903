"""Normalisations as one launch each, the sum before them included.

A decode step of a large model has two in every layer, of eight small kernels each in plain torch: with 32 layers some
five hundred launches, a fifth of a step on a fast GPU. A candidate runs beside the original on random numbers, and
replaces it only if the results are equal but for rounding.
"""

from __future__ import annotations

import torch
from torch import nn

from manylora.execution.fusion.replace import TOLERANCE, agree

__all__ = ["FusedNorm", "Summed", "fuse_norms"]


class Summed(torch.Tensor):
    """A sum with its normalised value; any operation on it returns a plain tensor."""

    norm: FusedNorm
    normed: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class FusedNorm(nn.Module):
    """A root-mean-square norm over the last dimension; with ``is_offset`` its factor is weight + 1 (Gemma)."""

    def __init__(self, weight: nn.Parameter, eps: float, *, is_offset: bool) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self.is_offset = is_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised, of the same shape and type."""
        if isinstance(x, Summed) and x.norm is self:
            return x.normed
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, x, None, out, out, is_sum=False)
        return out

    def add(
        self, residual: torch.Tensor, x: torch.Tensor, inner: FusedNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``residual + x`` and that sum normalised, both ``[..., width]`` of one type.

        ``inner`` normalises ``x`` before it is added; it is of the same kind as this norm.
        """
        assert inner is None or inner.is_offset == self.is_offset
        total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        self._launch(x, residual, inner, total, out, is_sum=True)
        return total, out

    def add_ahead(self, residual: torch.Tensor, x: torch.Tensor, inner: FusedNorm | None = None) -> Summed:
        """Return the sum, which carries its normalised value for this norm's own call."""
        total, out = self.add(residual, x, inner)
        summed = total.as_subclass(Summed)
        summed.norm, summed.normed = self, out
        return summed

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        inner: FusedNorm | None,
        total: torch.Tensor,
        out: torch.Tensor,
        *,
        is_sum: bool,
    ) -> None:
        from manylora.execution.kernels.triton import norm as triton_norm

        width = x.shape[-1]
        rows, others = _rows(x), _rows(residual)
        first = self if inner is None else inner
        triton_norm.rms_norm[(rows.shape[0],)](
            *(rows, rows.stride(0), others, others.stride(0)),
            *(first.weight, first._eps, self.weight, self._eps, total, out),
            WIDTH=width,
            BLOCK=1 << (width - 1).bit_length(),
            IS_OFFSET=self.is_offset,
            IS_SUM=is_sum,
            HAS_INNER=inner is not None,
        )


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace the root-mean-square norms of ``model`` in place; return their number."""
    count = 0
    for name, module in list(model.named_modules()):
        if (fused := _fused(module)) is not None:
            model.set_submodule(name, fused)
            count += 1
    return count


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as ``[rows, width]``, contiguous in the width."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _fused(module: nn.Module) -> FusedNorm | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or list(parameters) != ["weight"]:
        return None
    weight = parameters["weight"]
    if weight.ndim != 1 or weight.dtype not in TOLERANCE:
        return None
    generator = torch.Generator().manual_seed(0)
    x = (4.0 * torch.randn(2, weight.shape[0], generator=generator)).to(weight.device, weight.dtype)
    expected = module(x)
    for is_offset in (False, True):
        fused = FusedNorm(weight, eps, is_offset=is_offset)
        if agree([fused(x)], [expected]):
            return fused
    return None
