"""A module keeps its own forward unless another gives the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from manylora.execution.fusion.replace import agree, try_forward


def fail(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not a module of this kind")


@pytest.mark.parametrize(
    ("forward", "is_same"),
    [
        (lambda x: x.clamp(min=0.0), True),
        (lambda x: x.clamp(min=0.0) * (1.0 + 1e-7), True),
        (lambda x: x, False),
        (lambda x: x.clamp(min=0.0).double(), False),
        (lambda x: x.clamp(min=0.0)[:2], False),
        (lambda x: x * float("nan"), False),
        (fail, False),
    ],
)
def test_only_what_gives_the_same_stays(forward: Callable[[torch.Tensor], torch.Tensor], is_same: bool) -> None:
    module, other = nn.ReLU(), nn.ReLU()
    x = torch.linspace(-2.0, 3.0, 7)
    assert try_forward(module, forward, lambda: [module(x)]) == is_same
    assert (module.forward is forward) == is_same
    assert torch.allclose(module(x), other(x), atol=1e-6) and "forward" not in vars(other)


def test_a_module_that_fails_by_itself_is_left_alone() -> None:
    module = nn.Linear(3, 4)
    assert not try_forward(module, fail, lambda: [module(torch.zeros(5))])
    assert "forward" not in vars(module)


def test_nothing_seen_is_nothing_agreed() -> None:
    assert not agree([], [])
    assert not agree([torch.zeros(2)], [])
