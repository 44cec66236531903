"""Falcon's attention as a call of ours: transformers computes it within the layer's own code.

Its layers look their attention up by the name of the implementation, in a table that takes further classes. ``[T]``
tokens of one flat row have queries of all heads, and keys and values of fewer; transformers repeats these for all
heads before it stores them, which pages would hold many times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconLinear, apply_rotary_pos_emb

from manylora.core.errors import ConfigError
from manylora.execution.attention.call import ATTENTION_NAME, call_attention

__all__ = ["plain_linears", "register_falcon"]


def register_falcon(config: Any) -> None:
    """Let transformers build models of this configuration with our attention; may be repeated.

    ``ConfigError`` if its attention is of another kind (ALiBi).
    """
    if config.alibi:
        raise ConfigError(
            "Got a model of type 'falcon' with alibi = true, which is not supported: scores depend on distances"
        )
    modeling_falcon.FALCON_ATTENTION_CLASSES[ATTENTION_NAME] = _PagedAttention


def plain_linears(model: nn.Module) -> None:
    """Make Falcon's linears, which differ from torch's in the order of two operations alone, such as torch has."""
    for module in model.modules():
        if type(module) is FalconLinear:
            module.__class__ = nn.Linear


class _PagedAttention(FalconAttention):  # type: ignore[misc]
    """Falcon's projections around our attention."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the layer's attention ``[1, T, hidden]``, and no weights."""
        assert alibi is None and position_embeddings is not None
        heads = (part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states)))
        query, key, value = heads  # [1, heads, T, head_dim]
        if self.new_decoder_architecture:
            repeats = self.num_heads // self.num_kv_heads
            key, value = key[:, ::repeats], value[:, ::repeats]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out, _ = call_attention(self, query, key, value, attention_mask, self.inv_norm_factor)
        return self.dense(out.reshape(*hidden_states.shape[:2], -1)), None
