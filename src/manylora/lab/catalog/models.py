"""Models by name or by their ``config.json``: dimensions for cost models, a shape for an engine without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from manylora.core.adapters.shape import BaseShape, ModuleKind, TargetModule
from manylora.core.errors import ConfigError
from manylora.lab.catalog.dims import LatentAttention, ModelDims

__all__ = ["MODELS", "base_shape", "dims_from_config", "find_dims"]


TIED = ("cohere", "ernie4_5", "gemma", "lfm2", "smollm3", "starcoder2")
"""Beginnings of types of models whose head is the embedding where ``config.json`` does not say."""

UNGATED = ("apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2")
"""Types of models whose MLP is two matrices, without a gate."""


def dims_from_config(config: Mapping[str, object], *, name: str = "") -> ModelDims:
    """Read dimensions from the content of a Hugging Face ``config.json``.

    Args:
        config: The parsed file; of a multimodal one the ``text_config`` is used.
        name: Name of the model; its ``_name_or_path`` or ``model_type`` if empty.

    ``ConfigError`` if a number is missing or has another type.
    """
    fields = text if isinstance(text := config.get("text_config"), Mapping) else config

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = fields.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise ConfigError(f"config.json has no number {' or '.join(keys)}")
        return default

    heads, hidden, num_layers = number("num_attention_heads"), number("hidden_size"), number("num_hidden_layers")
    attending, state_bytes = _states(fields, number, num_layers)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    latent = _latent(number) if number("kv_lora_rank", default=0) else None
    dense = number("first_k_dense_replace", default=0) if experts else 0
    inner = number("moe_intermediate_size", "intermediate_size") if experts else number("intermediate_size")
    says_tied = [one["tie_word_embeddings"] for one in (fields, config) if "tie_word_embeddings" in one]
    wide = number("shared_expert_intermediate_size", default=0)  # of one expert, as wide as several
    kind = str(fields.get("model_type") or "")
    dtype = str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16").removeprefix("torch.")
    return ModelDims(
        name=name or str(config.get("_name_or_path") or kind or "model"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads) if latent is None else heads,
        head_dim=number("head_dim", default=hidden // heads)
        if latent is None
        else number("qk_nope_head_dim") + latent.rope_dim,
        value_dim=None if latent is None else number("v_head_dim"),
        latent=latent,
        intermediate_size=inner,
        vocab_size=number("vocab_size"),
        max_model_len=number("max_position_embeddings", default=4096),
        num_experts=experts,
        experts_per_token=number("num_experts_per_tok") if experts else 0,
        num_shared_experts=number("n_shared_experts", default=round(wide / max(1, inner))) if experts else 0,
        num_dense_layers=dense,
        dense_size=number("intermediate_size") if dense else 0,
        num_kv_layers=attending if state_bytes else None,
        state_bytes=state_bytes,
        has_gate=kind not in UNGATED,
        tie_embeddings=says_tied[0] is True if says_tied else kind.startswith(TIED),
        has_attention_bias=fields.get("attention_bias") is True or kind in ("qwen2", "qwen2_moe"),
        dtype=dtype,
        # Experts are widened as they are read (``checkpoint.matched``), and nearly all weights of a mixture are theirs.
        weight_bits=None
        if experts
        else _weight_bits(fields.get("quantization_config") or config.get("quantization_config")),
    )


def _latent(number: Callable[..., int]) -> LatentAttention:
    """Return the vectors of latent attention."""
    query_rank = number("q_lora_rank", default=0) or None
    return LatentAttention(kv_rank=number("kv_lora_rank"), rope_dim=number("qk_rope_head_dim"), query_rank=query_rank)


def _states(fields: Mapping[str, object], number: Callable[..., int], num_layers: int) -> tuple[int, int]:
    """Return the number of layers with attention, and the bytes of a sequence's states in the others.

    States are in float32 (``execution/model/recurrent.py``): the columns of a convolution, and those of a recurrence.
    """
    mamba, delta = number("mamba_n_heads", default=0), number("linear_num_value_heads", default=0)
    kinds, others = fields.get("layer_types"), fields.get("attn_layer_indices")
    recurrent = sum(kind in ("conv", "linear_attention", "mamba") for kind in kinds) if isinstance(kinds, list) else 0
    attending = num_layers - recurrent
    if mamba and not recurrent:  # Bamba names the layers with attention; Falcon H1 has both in every layer
        attending = len(others) if isinstance(others, list) else num_layers
        recurrent = num_layers - attending or num_layers
    if not recurrent:
        return num_layers, 0
    if mamba:
        inner = number("mamba_d_ssm", default=0) or mamba * number("mamba_d_head")
        channels = inner + 2 * number("mamba_n_groups", default=1) * number("mamba_d_state")
        numbers = channels * number("mamba_d_conv", default=4) + inner * number("mamba_d_state")
    elif delta:
        values, keys = number("linear_value_head_dim"), number("linear_key_head_dim")
        channels = 2 * number("linear_num_key_heads") * keys + delta * values
        numbers = channels * number("linear_conv_kernel_dim", default=4) + delta * keys * values
    else:
        numbers = number("hidden_size") * number("conv_L_cache")
    return attending, 4 * recurrent * numbers


def _weight_bits(quantisation: object) -> int | None:
    """Return the bits per weight that a ``quantization_config`` names; ``None`` without one."""
    if not isinstance(quantisation, Mapping):
        return None
    bits = quantisation.get("bits") or quantisation.get("w_bit")  # AWQ and GPTQ
    if isinstance(bits, int):
        return bits
    if quantisation.get("load_in_4bit"):
        return 4
    groups = quantisation.get("config_groups")  # compressed-tensors
    found = [
        weights.get("num_bits")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(weights := group.get("weights"), Mapping)
    ]
    return max((one for one in found if isinstance(one, int)), default=8)  # FP8 and LLM.int8() say no number


def _llama(
    name: str,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int = 32_000,
    max_model_len: int = 4096,
    **others: Any,
) -> ModelDims:
    return ModelDims(
        name=name,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        **others,
    )


MODELS: dict[str, ModelDims] = {
    dims.name: dims
    for dims in (
        _llama("llama-7b", 4096, 32, 32, 32, 11008),
        _llama("llama-2-7b", 4096, 32, 32, 32, 11008),
        _llama("llama-13b", 5120, 40, 40, 40, 13824),
        _llama("llama-2-13b", 5120, 40, 40, 40, 13824),
        _llama("llama-30b", 6656, 60, 52, 52, 17920),
        _llama("llama-2-70b", 8192, 80, 64, 8, 28672),
        _llama("llama-3-8b", 4096, 32, 32, 8, 14336, 128_256, 8192),
        _llama("llama-3-70b", 8192, 80, 64, 8, 28672, 128_256, 8192),
        _llama("mistral-7b", 4096, 32, 32, 8, 14336, max_model_len=32_768),
        _llama("mixtral-8x7b", 4096, 32, 32, 8, 14336, 32_000, 32_768, num_experts=8, experts_per_token=2),
        _llama("qwen2.5-7b", 3584, 28, 28, 4, 18944, 152_064, 32_768, has_attention_bias=True),
        _llama("qwen2.5-32b", 5120, 64, 40, 8, 27648, 152_064, 32_768, has_attention_bias=True),
        _llama("demo", 192, 4, 6, 2, 512, 115, 2048, dtype="float16"),
    )
}
"""Models by their names in papers, from their published configurations."""


def find_dims(model: str | ModelDims) -> ModelDims:
    """Return the dimensions of a named model, or raise ``ConfigError``; dimensions are returned unchanged."""
    if isinstance(model, ModelDims):
        return model
    if model not in MODELS:
        raise ConfigError(f"Got {model = }, expected one of {', '.join(MODELS)}, or dimensions from a config.json")
    return MODELS[model]


def base_shape(model: str | ModelDims, *, block_size: int = 16) -> BaseShape:
    """Return the shape of a Llama-like decoder with pages of ``block_size`` tokens.

    Modules are named as in ``transformers`` and PEFT.
    """
    dims = find_dims(model)
    hidden, inner, q_size, kv_size = dims.hidden_size, dims.intermediate_size, dims.q_size, dims.kv_size
    # Of modules with one input, the group, and the place of the outputs in it.
    places = {"k_proj": q_size, "v_proj": q_size + kv_size} if dims.latent is None else {}
    together = {"q_proj", *places} if places else ()
    linears = [  # name, inputs, outputs, group, place
        (f"self_attn.{name}", *sizes, f"self_attn.{'qkv' if name in together else name}", places.get(name, 0))
        for name, sizes in dims.attention_modules.items()
    ]
    if not dims.num_experts:
        linears += [("mlp.gate_proj", hidden, inner, "mlp.gate_up", 0)] if dims.has_gate else []
        linears += [
            ("mlp.up_proj", hidden, inner, "mlp.gate_up", inner if dims.has_gate else 0),
            ("mlp.down_proj", inner, hidden, "mlp.down_proj", 0),
        ]
    modules = [_at_the_end("model.embed_tokens", ModuleKind.EMBEDDING, dims.vocab_size, hidden)]
    for layer in range(dims.num_layers):
        prefix = f"model.layers.{layer}."
        modules += [
            TargetModule(
                name=prefix + name,
                kind=ModuleKind.LINEAR,
                in_features=inputs,
                out_features=outputs,
                layer=layer,
                group=prefix + group,
                offset=offset,
            )
            for name, inputs, outputs, group, offset in linears
        ]
    all_linear = tuple(module.name for module in modules if module.kind is ModuleKind.LINEAR)
    modules.append(_at_the_end("lm_head", ModuleKind.LINEAR, hidden, dims.vocab_size))
    page = dims.page_shape(block_size)
    digest = hashlib.blake2b(repr((dims.name, modules, page)).encode(), digest_size=16)  # without experts, as ever
    modules += _experts(dims)
    return BaseShape(
        name=dims.name,
        architecture="llama",
        fingerprint=digest.hexdigest(),
        vocab_size=dims.vocab_size,
        hidden_size=hidden,
        num_layers=dims.num_layers,
        max_model_len=dims.max_model_len,
        page=page,
        modules=tuple(modules),
        all_linear=all_linear,
        eos_token_ids=(),
        state_bytes=dims.state_bytes,
    )


def _experts(dims: ModelDims) -> Iterator[TargetModule]:
    """Yield the parameters of the experts of a mixture, layer by layer."""
    hidden, inner = dims.hidden_size, dims.intermediate_size
    for layer in range(dims.num_dense_layers, dims.num_layers if dims.num_experts else 0):
        for leaf, inputs, outputs in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
            name = f"model.layers.{layer}.mlp.experts.{leaf}"
            yield TargetModule(
                name=name,
                kind=ModuleKind.EXPERTS,
                in_features=inputs,
                out_features=outputs,
                layer=layer,
                group=name,
                offset=0,
                num_experts=dims.num_experts,
            )


def _at_the_end(name: str, kind: ModuleKind, in_features: int, out_features: int) -> TargetModule:
    """Return the embedding or the head, which are of no layer."""
    return TargetModule(
        name=name, kind=kind, in_features=in_features, out_features=out_features, layer=None, group=name, offset=0
    )
