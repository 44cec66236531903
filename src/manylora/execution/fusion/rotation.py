"""Attention modules that leave the rotation of q and k to the kernels that read them.

A module's forward calls ``apply_rotary_pos_emb`` and then our attention. It is replaced by a copy of its own code in
which that name returns q and k unchanged, with the angles attached. No class of transformers is changed and no forward
is written anew. Families with another rotation (interleaved pairs, or an operation on q afterwards) fail the comparison
and keep their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from manylora.execution.attention.call import Rotation, Unrotated, attending, rotate
from manylora.execution.fusion.replace import Echo, SeenCall, try_forward

__all__ = ["defer_rotations"]

_NAME = "apply_rotary_pos_emb"


@torch.inference_mode()
def defer_rotations(calls: Mapping[nn.Module, SeenCall]) -> int:
    """Change attention modules in place to defer their rotation, given recorded calls; return their number."""
    copies: dict[FunctionType, FunctionType] = {}
    count = 0
    for module, seen in calls.items():
        forward = unwrap(type(module).forward)  # from decorators that rename arguments
        if not isinstance(forward, FunctionType):
            continue
        if _NAME not in forward.__code__.co_names or _NAME not in forward.__globals__:
            continue
        if forward not in copies:
            copies[forward] = _without_rotation(forward)
        count += _try(module, seen, MethodType(copies[forward], module))
    return count


def _try(module: nn.Module, seen: SeenCall, forward: MethodType) -> bool:
    """Set the module's ``forward`` if attention gets the same arguments; return whether the rotation is deferred."""
    echo = Echo()

    def outcome() -> list[torch.Tensor]:
        echo.calls.clear()
        with attending(echo):
            module(*seen.args, **seen.kwargs)
        return [
            tensor
            for call in echo.calls
            for tensor in (rotate(call.query, call.rotation), rotate(call.key, call.rotation), call.value)
        ]

    return try_forward(module, forward, outcome) and all(call.rotation is not None for call in echo.calls)


def _without_rotation(forward: FunctionType) -> FunctionType:
    """Return ``forward`` with its call of the rotation deferred."""
    names = {**forward.__globals__, _NAME: partial(_defer, forward.__globals__[_NAME])}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _defer(apply: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``apply(q, k, cos, sin)``; call it for any other arguments."""
    if len(args) != 4 or kwargs:
        return apply(*args, **kwargs)
    query, key, cos, sin = args
    is_plain = (
        query.ndim == key.ndim == 4
        and query.shape[0] == key.shape[0] == 1
        and cos.shape == sin.shape == (1, query.shape[2], cos.shape[-1])
        and cos.shape[-1] <= query.shape[3]
        and cos.shape[-1] % 2 == 0
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
    )
    if not is_plain:
        return apply(query, key, cos, sin)
    rotation = Rotation(cos[0], sin[0])
    return Unrotated.of(query, rotation), Unrotated.of(key, rotation)
