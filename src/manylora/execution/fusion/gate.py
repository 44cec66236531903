"""Gated feed-forward modules with activation and product in one launch.

Nearly all families compute ``down(act(gate(x)) * up(x))``, some with gate and up in one linear. The activation is found
by comparing results; a module that computes anything else keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from manylora.execution.fusion.replace import SeenCall, try_forward

__all__ = ["GatedForward", "activate", "fuse_gates"]

BLOCK = 1024


def activate(gate: torch.Tensor, up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """Return ``act(gate) * up``, all ``[..., width]``; ``is_gelu`` means GELU by its tanh formula instead of SiLU."""
    from manylora.execution.kernels.triton import gate as triton_gate

    width = gate.shape[-1]
    rows = [x if x.stride(1) == 1 else x.contiguous() for x in (gate.reshape(-1, width), up.reshape(-1, width))]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    triton_gate.activate[(rows[0].shape[0], -(-width // BLOCK))](
        rows[0], rows[0].stride(0), rows[1], rows[1].stride(0), out, WIDTH=width, BLOCK=BLOCK, IS_GELU=is_gelu
    )
    return out


class GatedForward:
    """The forward of a module with ``down_proj``, and ``gate_proj`` and ``up_proj`` or both as ``gate_up_proj``."""

    def __init__(self, module: nn.Module, *, is_gelu: bool) -> None:
        self._down = module.get_submodule("down_proj")
        self._both = getattr(module, "gate_up_proj", None)
        self._gate, self._up = getattr(module, "gate_proj", None), getattr(module, "up_proj", None)
        self._is_gelu = is_gelu

    def __call__(self, x: torch.Tensor) -> object:
        """Return ``down(act(gate(x)) * up(x))``."""
        if self._both is not None:
            gate, up = self._both(x).chunk(2, dim=-1)
        else:
            assert self._gate is not None and self._up is not None
            gate, up = self._gate(x), self._up(x)
        return self._down(activate(gate, up, is_gelu=self._is_gelu))


@torch.inference_mode()
def fuse_gates(calls: Mapping[nn.Module, SeenCall]) -> int:
    """Fuse gated feed-forward modules in place, given recorded calls of the model's modules; return their number."""
    return sum(_fuse(module, seen) for module, seen in calls.items() if _has_parts(module))


def _fuse(module: nn.Module, seen: SeenCall) -> bool:
    def outcome() -> list[torch.Tensor]:
        return [module(*seen.args, **seen.kwargs)]

    return any(try_forward(module, GatedForward(module, is_gelu=is_gelu), outcome) for is_gelu in (False, True))


def _has_parts(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return "down_proj" in children and ("gate_up_proj" in children or {"gate_proj", "up_proj"} <= children.keys())
