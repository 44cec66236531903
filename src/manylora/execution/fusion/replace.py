"""Replace a module's forward by a faster one with the same results.

The function of a transformers module follows from its code, not from its name. So a replacement is checked: the module
runs on recorded arguments, with its own forward and with ours, and keeps ours only if the results are equal but for
rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manylora.execution.attention.call import AttentionCall, attending, rotate

__all__ = ["TOLERANCE", "Echo", "SeenCall", "agree", "try_forward", "watch_calls"]

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference that rounding explains, relative to the largest value."""

POSITIONS = (1, 6)  # probe positions; not 0, where RoPE is the identity


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A recorded call of a module: its arguments and its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: object


@dataclass(slots=True)
class Echo:
    """Attention that returns the query, so that later modules get numbers; records the calls."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the query, rotated, ``[T, heads, value_dim]``."""
        self.calls.append(call)
        query = rotate(call.query, call.rotation).transpose(0, 1)
        return nn.functional.pad(query, (0, call.value.shape[2] - query.shape[2]))


@torch.inference_mode()
def watch_calls(model: nn.Module) -> dict[nn.Module, SeenCall]:
    """Run the model once on a few tokens; return each module's last call, in order of the first calls."""
    calls: dict[nn.Module, SeenCall] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        calls[module] = SeenCall(args, kwargs, output)

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        tokens = torch.tensor([POSITIONS], device=next(model.parameters()).device)
        with attending(Echo()):
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def try_forward(
    module: nn.Module, forward: Callable[..., object], outcome: Callable[[], Sequence[torch.Tensor]]
) -> bool:
    """Set ``forward``, of the same arguments, as the module's own if ``outcome`` stays the same; return whether so.

    ``outcome`` runs the module and returns the tensors to compare.
    """
    try:
        expected = outcome()
        module.forward = forward
        is_same = agree(outcome(), expected)
    except Exception as error:  # any failure means that the module is of another kind
        logger.debug("forward_refused module=%s error=%r", type(module).__name__, error)
        is_same = False
    if not is_same:
        vars(module).pop("forward", None)
    return is_same


def agree(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are equal but for rounding; ``False`` if there are none."""
    return len(found) == len(expected) > 0 and all(_agree(*pair) for pair in zip(found, expected, strict=True))


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype or expected.dtype not in TOLERANCE:
        return False
    scale = expected.float().abs().max().clamp(min=1e-6)
    return bool((found.float() - expected.float()).abs().max() / scale <= TOLERANCE[expected.dtype])
