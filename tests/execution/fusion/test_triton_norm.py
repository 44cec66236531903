"""Norms in one launch: which modules are replaced, and that nothing changes by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from triton_cases import DEVICE, DTYPES, HALVES, TOLERANCE, poison, relative_error

from manylora.execution.fusion.layers import FusedNorm, fuse_norms

pytest.importorskip("triton")

__all__ = ["poison"]


class CentredRMSNorm(nn.Module):
    """Called a norm of that kind, and none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_norms_are_replaced_where_they_are_norms(dtype: str) -> None:
    torch.manual_seed(0)
    norms = {"llama": LlamaRMSNorm(48, eps=1e-3), "gemma": Gemma2RMSNorm(40, eps=1e-5), "other": CentredRMSNorm(8)}
    model = nn.ModuleDict(norms)
    for module in norms.values():
        module.weight.data.normal_(0.5, 0.3)
    model.requires_grad_(False).to(DEVICE, DTYPES[dtype])
    assert fuse_norms(model) == 2
    assert [isinstance(model[name], FusedNorm) for name in norms] == [True, True, False]
    for name, width in (("llama", 48), ("gemma", 40)):
        # Heads of a wider row, as norms of queries see them.
        x = torch.randn(2, 3, 4, width + 8).to(DEVICE, DTYPES[dtype])[..., :width]
        found = model[name](x)
        assert found.shape == x.shape and found.dtype == x.dtype
        assert relative_error(found, norms[name](x)) < TOLERANCE[DTYPES[dtype]]
        # The sum before it, of rows that lie apart, and another norm before that.
        y = torch.randn(2, 3, 4, 2 * width).to(DEVICE, DTYPES[dtype])[..., width:]
        inner = FusedNorm(nn.Parameter(1.0 - 3.0 * norms[name].weight), 1e-2, is_offset=name == "gemma")
        for before in (None, inner):
            expected = y + (x if before is None else before(x))
            total, normed = model[name].add(y, x, before)
            assert (
                torch.equal(total, expected) if before is None else relative_error(total, expected) < TOLERANCE[x.dtype]
            )
            assert relative_error(normed, norms[name](expected)) < TOLERANCE[DTYPES[dtype]]


def test_a_sum_that_is_normalised_already_is_handed_out_once() -> None:
    model = nn.ModuleDict({"one": LlamaRMSNorm(16), "two": LlamaRMSNorm(16)}).requires_grad_(False).to(DEVICE)
    model["two"].weight.data.fill_(2.0)
    assert fuse_norms(model) == 2
    x = torch.randn(1, 3, 16, device=DEVICE)
    summed = model["one"].add_ahead(x, x)
    assert model["one"](summed) is summed.normed
    torch.testing.assert_close(model["two"](summed), 2 * summed.normed)  # another norm computes its own
    assert type(summed + x) is torch.Tensor  # and what is computed from the sum is no sum of that kind
