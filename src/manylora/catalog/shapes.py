"""Shapes of base models from their published dimensions, for engines that have no weights."""

from __future__ import annotations

import hashlib

from manylora.adapters.shape import ELEMENT_BYTES, BaseShape, ModuleKind, PageShape, TargetModule

__all__ = ["decoder_shape"]


def decoder_shape(
    *,
    name: str,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int | None,
    vocab_size: int,
    max_model_len: int,
    block_size: int = 16,
    dtype: str = "bfloat16",
    eos_token_ids: tuple[int, ...] = (),
) -> BaseShape:
    """Return the shape of a Llama-like decoder, module names as ``transformers`` and PEFT have them.

    Args:
        name: For people.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        intermediate_size: Width of the MLP; ``None`` where it is experts, which take no adapter.
        vocab_size: Rows of the embedding.
        max_model_len: Longest context in tokens.
        block_size: Tokens per page.
        dtype: Precision of KV and adapters.
        eos_token_ids: Tokens that end a sequence.
    """
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    modules = [
        _module("model.embed_tokens", vocab_size, hidden_size, None, "model.embed_tokens", kind=ModuleKind.EMBEDDING)
    ]
    for layer in range(num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        modules += [
            _module(f"{attention}.q_proj", hidden_size, q_size, layer, f"{attention}.qkv"),
            _module(f"{attention}.k_proj", hidden_size, kv_size, layer, f"{attention}.qkv", q_size),
            _module(f"{attention}.v_proj", hidden_size, kv_size, layer, f"{attention}.qkv", q_size + kv_size),
            _module(f"{attention}.o_proj", q_size, hidden_size, layer, f"{attention}.o_proj"),
        ]
        if intermediate_size is None:
            continue
        modules += [
            _module(f"{mlp}.gate_proj", hidden_size, intermediate_size, layer, f"{mlp}.gate_up"),
            _module(f"{mlp}.up_proj", hidden_size, intermediate_size, layer, f"{mlp}.gate_up", intermediate_size),
            _module(f"{mlp}.down_proj", intermediate_size, hidden_size, layer, f"{mlp}.down_proj"),
        ]
    all_linear = tuple(module.name for module in modules if module.kind is ModuleKind.LINEAR)
    modules.append(_module("lm_head", hidden_size, vocab_size, None, "lm_head"))
    page = PageShape(
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        element_bytes=ELEMENT_BYTES[dtype],
        dtype=dtype,
    )
    return BaseShape(
        name=name,
        architecture="llama",
        fingerprint=hashlib.blake2b(repr((name, modules, page)).encode(), digest_size=16).hexdigest(),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_model_len=max_model_len,
        page=page,
        modules=tuple(modules),
        all_linear=all_linear,
        eos_token_ids=eos_token_ids,
    )


def _module(
    name: str,
    in_features: int,
    out_features: int,
    layer: int | None,
    group: str,
    offset: int = 0,
    kind: ModuleKind = ModuleKind.LINEAR,
) -> TargetModule:
    return TargetModule(
        name=name,
        kind=kind,
        in_features=in_features,
        out_features=out_features,
        layer=layer,
        group=group,
        offset=offset,
    )
