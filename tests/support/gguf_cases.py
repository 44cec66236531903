"""GGUF files of tiny models, written as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import nn
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

NORMS_PLUS_ONE = ("gemma2", "gemma3", "nemotron")


def random_blocks(kind: Kind, rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return rows of blocks with any codes, and scales that are no larger than 1."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    places = {Kind.Q6_K: [208], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q8_0: [0], Kind.Q4_0: [0]}[kind]
    for place in places:
        halves = rng.uniform(-1, 1, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8).reshape(*halves.shape, 2)
    return blocks.reshape(rows, -1)


def permuted(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Return rows of queries or keys as llama.cpp orders them: the two halves of a head in turns."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def fields_of(config: Any, architecture: str) -> dict[str, Any]:
    """Return the fields that the converter writes for a configuration."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if architecture in ("starcoder2", "stablelm", "nemotron"):
        names = ("layer_norm_eps", "norm_epsilon", "norm_eps")
        fields["attention.layer_norm_epsilon"] = next(getattr(config, name) for name in names if hasattr(config, name))
    else:
        fields["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if architecture in ("qwen3", "gemma2", "gemma3"):
        fields |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if getattr(config, "sliding_window", None) and architecture in ("gemma2", "gemma3", "phi3"):
        fields["attention.sliding_window"] = config.sliding_window
    if architecture in ("llama", "phi3", "stablelm", "nemotron"):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        fields["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            fields[name] = getattr(config, name)
    if architecture == "llama":
        fields["vocab_size"] = config.vocab_size
    if architecture == "stablelm":
        fields["use_parallel_residual"] = config.use_parallel_residual
    return fields


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)


def write_gguf(
    path: Path,
    model: nn.Module,
    architecture: str,
    kind_of: Callable[[str, tuple[int, ...]], Kind] = lambda name, shape: Kind.F32,
    *,
    fields: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    name: str = "tiny",
    seed: int = 0,
    tokens: Sequence[str] = (),
    merges: Sequence[str] = (),
    eos: int | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write a model; return its weights as the gguf library reads them back, by transformers' names.

    Args:
        path: The file.
        model: Of transformers.
        architecture: llama.cpp's name of it.
        kind_of: The kind of blocks of a tensor, by its name and shape; K blocks hold random codes.
        fields: Further fields of the architecture, or others than the configuration's; ``None`` leaves one out.
        extra: Further tensors.
        name: Of the model.
        seed: Of random codes.
        tokens: Of the vocabulary, ``t0``, ``t1`` ... by default.
        merges: Of the vocabulary.
        eos: The token that ends an answer, if there is one.
    """
    config: Any = model.config
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    for field, value in {**fields_of(config, architecture), **(fields or {})}.items():
        if value is not None:
            add_field(writer, f"{architecture}.{field}", value)
    writer.add_name(name)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens) or [f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(list(merges))
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_pad_token_id(0)
    tied: Any = model.all_tied_weights_keys
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    names = get_gguf_hf_weights_map(model, TensorProcessor())
    read: dict[str, NDArray[np.float32]] = {}
    for tensor, parameter in names.items():
        if parameter not in held:
            continue
        weight = held[parameter].float().numpy()
        heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
        num_heads = next((count for part, count in heads.items() if part in tensor and architecture == "llama"), None)
        if num_heads is not None:
            weight = permuted(weight, num_heads)
        if architecture in NORMS_PLUS_ONE and tensor.endswith("norm.weight"):
            weight = weight + 1
        kind = kind_of(tensor, weight.shape)
        if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
            raw: NDArray[Any] = random_blocks(kind, *weight.shape, rng)
        else:
            raw = gguf.quantize(weight, kind)
        writer.add_tensor(tensor, raw, raw_dtype=kind)
        numbers = gguf.dequantize(raw, kind).reshape(weight.shape)
        if num_heads is not None:
            half = len(weight) // num_heads // 2
            numbers = numbers.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(numbers.shape)
        if architecture in NORMS_PLUS_ONE and tensor.endswith("norm.weight"):
            numbers = numbers - 1
        read[parameter] = numbers
    for tensor, numbers in (extra or {}).items():
        writer.add_tensor(tensor, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read
