"""Decoder layers in fewer launches: norms, rotations, gated feed-forwards, and each sum with the norm behind it.

::

    hidden --------------------------+---------------------------------+-------> the next layer
      |                              |                                 |
      norm -> attention -> out  -> add, norm -> feed-forward -> out -> add, norm of the next layer

A decode step of a large model has two norms in every layer, of eight small kernels each in plain torch: with 32 layers
some five hundred launches, a fifth of a step on a fast GPU. Gemma's norm of the added term is in the same launch. The
recorded calls show which norm follows a layer: the layer computes it in its last launch, and its output carries the
result. A norm that gets another tensor computes its own.

Nearly all families compute ``down(act(gate(x)) * up(x))``, some with gate and up in one linear. The activation is found
by comparing results. A module that computes anything else keeps its own forward.

Attention modules leave the rotation of q and k to the kernels that read them. A module's forward calls
``apply_rotary_pos_emb`` and then our attention: it is replaced by a copy of its own code in which that name returns q
and k unchanged, with the angles attached. No class of transformers is changed and no forward is written anew. Families
with another rotation (interleaved pairs, or an operation on q afterwards) fail the comparison and keep their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from manylora.execution.attention.call import Rotation, Unrotated, attending, rotate
from manylora.execution.fusion.replace import TOLERANCE, Echo, SeenCall, agree, try_forward, watch_calls
from manylora.execution.kernels.triton.support import power_of_two
from manylora.execution.lora.vectors import AdaptedNumbers

__all__ = ["FusedNorm", "activate", "fuse_gates", "fuse_launches", "fuse_norms", "fuse_residuals"]

logger = logging.getLogger(__name__)

GATE_BLOCK = 1024

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_FURTHER_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}

_SCALES = (2.0**-6, 2.0**6)  # input scales of the comparison: one much smaller than the added term, and one much larger


def fuse_launches(model: nn.Module) -> None:
    """Change ``model`` in place to take fewer launches, on Triton and with attention that rotates.

    A module whose results differ from the replacement's keeps its own forward.
    """
    norms = fuse_norms(model)
    calls = watch_calls(model)
    with attending(Echo()):
        rotations, gates, residuals = defer_rotations(calls), fuse_gates(calls), fuse_residuals(calls)
    logger.info("launches_fused norms=%d rotations=%d gates=%d residuals=%d", norms, rotations, gates, residuals)


class Summed(torch.Tensor):
    """A sum with its normalised value; any operation on it returns a plain tensor."""

    norm: FusedNorm
    normed: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class FusedNorm(nn.Module):
    """A root-mean-square norm over the last dimension; with ``is_offset`` its factor is weight + 1 (Gemma).

    Adapters may change its output as that of the module whose place it takes (``numbers``).
    """

    def __init__(
        self, weight: nn.Parameter, eps: float, *, is_offset: bool, numbers: AdaptedNumbers | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self.is_offset = is_offset
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised, of the same shape and type."""
        if isinstance(x, Summed) and x.norm is self:
            return x.normed
        return self._launch(x, None, None)[1]

    def add(
        self, residual: torch.Tensor, x: torch.Tensor, inner: FusedNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``residual + x`` and that sum normalised, both ``[..., width]`` of one type.

        ``inner`` normalises ``x`` before it is added; it is of the same kind as this norm.
        """
        assert inner is None or inner.is_offset == self.is_offset
        if inner is not None and inner.numbers is not None and inner.numbers.is_used:
            x, inner = inner(x), None
        return self._launch(x, residual, inner)

    def add_ahead(self, residual: torch.Tensor, x: torch.Tensor, inner: FusedNorm | None = None) -> Summed:
        """Return the sum, which carries its normalised value for this norm's own call."""
        total, out = self.add(residual, x, inner)
        summed = total.as_subclass(Summed)
        summed.norm, summed.normed = self, out
        return summed

    def _launch(
        self, x: torch.Tensor, residual: torch.Tensor | None, inner: FusedNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x`` plus ``residual``, and the norm of that; without ``residual`` the norm twice."""
        from manylora.execution.kernels.triton import fused as triton_fused

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = out if residual is None else torch.empty_like(out)
        width = x.shape[-1]
        block = power_of_two(width)
        rows = _rows(x)
        others = rows if residual is None else _rows(residual)
        first = self if inner is None else inner
        triton_fused.rms_norm[(rows.shape[0],)](
            *(rows, rows.stride(0), others, others.stride(0)),
            *(first.weight, first._eps, self.weight, self._eps, total, out),
            WIDTH=width,
            BLOCK=block,
            IS_OFFSET=self.is_offset,
            IS_SUM=residual is not None,
            HAS_INNER=inner is not None,
            # A few rows occupy a few processors: threads enough to read ahead.
            num_warps=min(16, max(4, block // 512)),
        )
        return total, out if self.numbers is None else self.numbers.apply(out)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace the root-mean-square norms of ``model`` in place; return their number."""
    count = 0
    for name, module in list(model.named_modules()):
        if (fused := _fused_norm(module)) is not None:
            model.set_submodule(name, fused)
            count += 1
    return count


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as ``[rows, width]``, contiguous in the width."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _fused_norm(module: nn.Module) -> FusedNorm | None:
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
        fused = FusedNorm(weight, eps, is_offset=is_offset, numbers=getattr(module, "numbers", None))
        if agree([fused(x)], [expected]):
            return fused
    return None


def layer_forward(layer: nn.Module, following: FusedNorm | None) -> Callable[..., torch.Tensor]:
    """Return the forward of a decoder layer with a norm before attention and before its feed-forward.

    Args:
        layer: Has ``input_layernorm``, ``self_attn``, ``post_attention_layernorm`` and ``mlp``. With
            ``pre_feedforward_layernorm`` and ``post_feedforward_layernorm`` too, added terms are normalised (Gemma).
        following: The norm of its output, if there is one.
    """
    children = dict(layer.named_children())
    attention, mlp, before_attention = children["self_attn"], children["mlp"], children["input_layernorm"]
    behind_attention = behind_mlp = None
    before_mlp = _norm(children["post_attention_layernorm"])
    if "pre_feedforward_layernorm" in children:
        behind_attention, before_mlp = before_mlp, _norm(children["pre_feedforward_layernorm"])
        behind_mlp = _norm(children["post_feedforward_layernorm"])

    def forward(hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        attended, _ = attention(hidden_states=before_attention(hidden_states), **kwargs)
        hidden_states, normed = before_mlp.add(hidden_states, attended, behind_attention)
        fed: torch.Tensor = mlp(normed)
        if following is not None:
            return following.add_ahead(hidden_states, fed, behind_mlp)
        return hidden_states + (fed if behind_mlp is None else behind_mlp(fed))

    return forward


@torch.inference_mode()
def fuse_residuals(calls: Mapping[nn.Module, SeenCall]) -> int:
    """Fuse decoder layers in place, given recorded calls of modules, fused norms among them; return their number."""
    norm_of = {
        id(seen.args[0]): norm for norm, seen in calls.items() if isinstance(norm, FusedNorm) and len(seen.args) == 1
    }
    return sum(
        _fuse_layer(layer, seen, norm_of.get(id(seen.output))) for layer, seen in calls.items() if _is_layer(layer)
    )


def _fuse_layer(layer: nn.Module, seen: SeenCall, following: FusedNorm | None) -> bool:
    if len(seen.args) != 1 or not isinstance(seen.args[0], torch.Tensor):
        return False
    unit = seen.args[0] / seen.args[0].abs().max()

    def outcome() -> list[torch.Tensor]:
        outputs = [layer(unit * scale, **seen.kwargs) for scale in _SCALES]
        return outputs if following is None else [*outputs, *(following(output) for output in outputs)]

    return try_forward(layer, layer_forward(layer, following), outcome)


def _is_layer(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    norms = {name for name in children if name.endswith("layernorm")}
    further = norms - _PARTS
    return (
        children.keys() >= _PARTS
        and (not further or further == _FURTHER_NORMS)
        and all(isinstance(children[name], FusedNorm) for name in norms)
    )


def _norm(module: nn.Module) -> FusedNorm:
    assert isinstance(module, FusedNorm)
    return module


def activate(gate: torch.Tensor, up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """Return ``act(gate) * up``, all ``[..., width]``; ``is_gelu`` means GELU by its tanh formula instead of SiLU."""
    from manylora.execution.kernels.triton import fused as triton_fused

    width = gate.shape[-1]
    rows = [x if x.stride(1) == 1 else x.contiguous() for x in (gate.reshape(-1, width), up.reshape(-1, width))]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    triton_fused.activate[(rows[0].shape[0], -(-width // GATE_BLOCK))](
        rows[0], rows[0].stride(0), rows[1], rows[1].stride(0), out, WIDTH=width, BLOCK=GATE_BLOCK, IS_GELU=is_gelu
    )
    return out


def gated_forward(module: nn.Module, *, is_gelu: bool) -> Callable[[torch.Tensor], object]:
    """Return the forward of a module with ``down_proj``, and ``gate_proj`` and ``up_proj`` or both as ``gate_up_proj``.

    It returns ``down(act(gate(x)) * up(x))``.
    """
    children = dict(module.named_children())
    down, both = children["down_proj"], children.get("gate_up_proj")

    def forward(x: torch.Tensor) -> object:
        parts = both(x).chunk(2, dim=-1) if both is not None else (children["gate_proj"](x), children["up_proj"](x))
        return down(activate(*parts, is_gelu=is_gelu))

    return forward


@torch.inference_mode()
def fuse_gates(calls: Mapping[nn.Module, SeenCall]) -> int:
    """Fuse gated feed-forward modules in place, given recorded calls of the model's modules; return their number."""
    return sum(_fuse_gate(module, seen) for module, seen in calls.items() if _is_gated(module))


def _fuse_gate(module: nn.Module, seen: SeenCall) -> bool:
    def outcome() -> list[torch.Tensor]:
        return [module(*seen.args, **seen.kwargs)]

    return any(try_forward(module, gated_forward(module, is_gelu=is_gelu), outcome) for is_gelu in (False, True))


def _is_gated(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return "down_proj" in children and ("gate_up_proj" in children or {"gate_proj", "up_proj"} <= children.keys())


_ROTATE = "apply_rotary_pos_emb"


@torch.inference_mode()
def defer_rotations(calls: Mapping[nn.Module, SeenCall]) -> int:
    """Change attention modules in place to defer their rotation, given recorded calls; return their number."""
    copies: dict[FunctionType, FunctionType] = {}
    count = 0
    for module, seen in calls.items():
        forward = unwrap(type(module).forward)  # from decorators that rename arguments
        if not isinstance(forward, FunctionType):
            continue
        if _ROTATE not in forward.__code__.co_names or _ROTATE not in forward.__globals__:
            continue
        if forward not in copies:
            copies[forward] = _without_rotation(forward)
        count += _try_rotation(module, seen, MethodType(copies[forward], module))
    return count


def _try_rotation(module: nn.Module, seen: SeenCall, forward: MethodType) -> bool:
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
    names = {**forward.__globals__, _ROTATE: partial(_defer, forward.__globals__[_ROTATE])}
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
