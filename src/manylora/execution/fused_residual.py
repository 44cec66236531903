"""Decoder layers whose sums and the norms behind them are one launch each.

::

    hidden --------------------------+---------------------------------+-------> the next layer
      |                              |                                 |
      norm -> attention -> out  -> add, norm -> feed-forward -> out -> add, norm of the next layer

A layer that ends in a sum knows which norm comes next, since that was seen; it computes it along, and its output
carries the result. The norm hands it out; a norm that gets another tensor computes its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from manylora.execution.fused_norm import FusedNorm
from manylora.execution.trial import SeenCall, try_forward

__all__ = ["PreNormForward", "fuse_residuals"]

_SCALES = (2.0**-6, 2.0**6)
"""Inputs a trial is run on: one that what is added outweighs, and one that outweighs it."""


class PreNormForward:
    """The forward of a pre-norm decoder layer, as most families write it.

    Args:
        layer: Has ``input_layernorm``, ``self_attn``, ``post_attention_layernorm`` and ``mlp``.
        following: The norm that its output goes to, if there is one.
    """

    def __init__(self, layer: nn.Module, following: FusedNorm | None) -> None:
        self._before_attention = layer.get_submodule("input_layernorm")
        self._attention = layer.get_submodule("self_attn")
        self._before_mlp = layer.get_submodule("post_attention_layernorm")
        self._mlp = layer.get_submodule("mlp")
        self._following = following

    def __call__(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Return the layer's output ``[1, T, hidden]``."""
        assert isinstance(self._before_mlp, FusedNorm)
        attended, _ = self._attention(hidden_states=self._before_attention(hidden_states), **kwargs)
        hidden_states, normed = self._before_mlp.add(hidden_states, attended)
        fed = self._mlp(normed)
        return hidden_states + fed if self._following is None else self._following.add_ahead(hidden_states, fed)


@torch.inference_mode()
def fuse_residuals(calls: Mapping[nn.Module, SeenCall]) -> int:
    """Give every pre-norm decoder layer a forward of fewer launches; return how many.

    Args:
        calls: How the model's modules, fused norms among them, are called; layers are changed in place.
    """
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

    return try_forward(layer, PreNormForward(layer, following), outcome)


def _has_parts(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    norms = (children.get("input_layernorm"), children.get("post_attention_layernorm"))
    names = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    return all(isinstance(norm, FusedNorm) for norm in norms) and children.keys() >= names
