"""The gated activation in one launch, against torch's two."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from triton_cases import DEVICE, DTYPES, HALVES, TOLERANCE, poison, relative_error

from manylora.execution.fusion.layers import activate

pytest.importorskip("triton")

__all__ = ["poison"]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("is_gelu", [False, True])
def test_activation_and_product(is_gelu: bool, dtype: str) -> None:
    torch.manual_seed(0)
    for width in (1, 48, 1030):  # the last takes two programs a row
        both = (3.0 * torch.randn(1, 3, 2 * width + 2)).to(DEVICE, DTYPES[dtype])
        gate, up = both[..., :width], both[..., width + 2 :]
        found = activate(gate, up, is_gelu=is_gelu)
        active = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
        assert found.shape == gate.shape and found.dtype == gate.dtype and found.is_contiguous()
        assert relative_error(found, active.double() * up.double()) < TOLERANCE[DTYPES[dtype]]


def test_large_numbers_do_not_overflow() -> None:
    gate = torch.tensor([[-3e4, -200.0, -0.0, 0.0, 200.0, 3e4]], device=DEVICE)
    for is_gelu in (False, True):
        found = activate(gate, torch.ones_like(gate), is_gelu=is_gelu)
        torch.testing.assert_close(found, gate.clamp(min=0.0))
