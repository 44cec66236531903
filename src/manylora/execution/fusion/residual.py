"""Decoder layers with each sum and the norm behind it in one launch.

::

    hidden --------------------------+---------------------------------+-------> the next layer
      |                              |                                 |
      norm -> attention -> out  -> add, norm -> feed-forward -> out -> add, norm of the next layer

Gemma's norm of the other term is in the same launch. The recorded calls show which norm follows a layer: the layer
computes it in its last launch, and its output carries the result. A norm that gets another tensor computes its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from manylora.execution.fusion.norm import FusedNorm
from manylora.execution.fusion.replace import SeenCall, try_forward

__all__ = ["LayerForward", "fuse_residuals"]

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_FURTHER_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}

_SCALES = (2.0**-6, 2.0**6)
"""Input scales of the comparison: one much smaller than the added term, and one much larger."""


class LayerForward:
    """The forward of a decoder layer with a norm before attention and before its feed-forward.

    Args:
        layer: Has ``input_layernorm``, ``self_attn``, ``post_attention_layernorm`` and ``mlp``. With
            ``pre_feedforward_layernorm`` and ``post_feedforward_layernorm`` too, added terms are normalised (Gemma).
        following: The norm of its output, if there is one.
    """

    def __init__(self, layer: nn.Module, following: FusedNorm | None) -> None:
        children = dict(layer.named_children())
        self._attention, self._mlp = children["self_attn"], children["mlp"]
        self._before_attention = _norm(children["input_layernorm"])
        self._behind_attention = self._behind_mlp = None
        if "pre_feedforward_layernorm" in children:
            self._behind_attention = _norm(children["post_attention_layernorm"])
            self._before_mlp = _norm(children["pre_feedforward_layernorm"])
            self._behind_mlp = _norm(children["post_feedforward_layernorm"])
        else:
            self._before_mlp = _norm(children["post_attention_layernorm"])
        self._following = following

    def __call__(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Return the layer's output ``[1, T, hidden]``."""
        attended, _ = self._attention(hidden_states=self._before_attention(hidden_states), **kwargs)
        hidden_states, normed = self._before_mlp.add(hidden_states, attended, self._behind_attention)
        fed: torch.Tensor = self._mlp(normed)
        if self._following is not None:
            return self._following.add_ahead(hidden_states, fed, self._behind_mlp)
        return hidden_states + (fed if self._behind_mlp is None else self._behind_mlp(fed))


@torch.inference_mode()
def fuse_residuals(calls: Mapping[nn.Module, SeenCall]) -> int:
    """Fuse decoder layers in place, given recorded calls of modules, fused norms among them; return their number."""
    norm_of = {
        id(seen.args[0]): norm for norm, seen in calls.items() if isinstance(norm, FusedNorm) and len(seen.args) == 1
    }
    return sum(_fuse(layer, seen, norm_of.get(id(seen.output))) for layer, seen in calls.items() if _has_parts(layer))


def _fuse(layer: nn.Module, seen: SeenCall, following: FusedNorm | None) -> bool:
    if len(seen.args) != 1 or not isinstance(seen.args[0], torch.Tensor):
        return False
    unit = seen.args[0] / seen.args[0].abs().max()

    def outcome() -> list[torch.Tensor]:
        outputs = [layer(unit * scale, **seen.kwargs) for scale in _SCALES]
        return outputs if following is None else [*outputs, *(following(output) for output in outputs)]

    return try_forward(layer, LayerForward(layer, following), outcome)


def _has_parts(layer: nn.Module) -> bool:
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
