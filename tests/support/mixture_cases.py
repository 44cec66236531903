"""Tiny mixtures of experts in the files of quantised checkpoints, packed and decoded here number by number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_cases import FILE, pack
from families import save
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

__all__ = ["MIXTURES", "Mixture", "write_mixture"]

GROUP = 16
BLOCK = (24, 40)  # outputs and inputs, which divide no weight here
_SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "pad_token_id": 0,
}
_ROUTED = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}

Parts = dict[str, Tensor]
Make = Callable[[np.random.Generator, int, int], tuple[NDArray[np.float64], Parts]]
"""Returns a random weight ``[out, in]``, and the tensors beside its module that hold it."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A configuration, how its experts and other linears are stored, and ``quantization_config``."""

    config: Callable[[], PreTrainedConfig]
    make: Make | None  # ``None`` for experts of gpt-oss in mxfp4
    quantised: Mapping[str, Any]


def _e4m3(code: int) -> float:
    sign, exponent, fraction = 1 - 2 * (code >> 7), code >> 3 & 15, code & 7
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def _e2m1(code: int) -> float:
    sign, exponent, fraction = 1 - 2 * (code >> 3), code >> 1 & 3, code & 1
    return sign * (fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))


def _float8(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[NDArray[np.float64], Parts]:
    codes = rng.integers(0, 2, (num_out, num_in)) << 7 | rng.integers(0, 0x48, (num_out, num_in))
    grid = tuple(-(-size // step) for size, step in zip((num_out, num_in), BLOCK, strict=True))
    scales = rng.uniform(0.5, 1.5, grid).astype(np.float32) / num_in**0.5
    spread = np.array([[scales[o // BLOCK[0], i // BLOCK[1]] for i in range(num_in)] for o in range(num_out)])
    weight = np.vectorize(_e4m3)(codes) * spread
    octets = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    return weight, {"weight": octets, "weight_scale_inv": torch.from_numpy(scales)}


def _four_bits(
    rng: np.random.Generator, num_out: int, num_in: int
) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return a weight, and its codes, zero points and scales."""
    codes = rng.integers(0, 16, (num_out, num_in))
    zeros = rng.integers(6, 10, (num_out, num_in // GROUP))
    scales = (rng.uniform(0.5, 1.5, zeros.shape) / (5 * num_in**0.5)).astype(np.float16)
    groups = np.arange(num_in) // GROUP
    return scales.astype(np.float64)[:, groups] * (codes - zeros[:, groups]), codes, zeros, scales


def _gptq(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[NDArray[np.float64], Parts]:
    weight, codes, zeros, scales = _four_bits(rng, num_out, num_in)
    return weight, {
        "qweight": pack(codes, 4).T,
        "qzeros": pack(zeros.T - 1, 4),
        "scales": torch.from_numpy(scales.T),
        "g_idx": torch.arange(num_in, dtype=torch.int32) // GROUP,
    }


def _awq(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[NDArray[np.float64], Parts]:
    weight, codes, zeros, scales = _four_bits(rng, num_out, num_in)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = {"qweight": pack(codes.T, 4, order), "qzeros": pack(zeros.T, 4, order)}
    return weight, packed | {"scales": torch.from_numpy(scales.T)}


def _packed(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[NDArray[np.float64], Parts]:
    weight, codes, zeros, scales = _four_bits(rng, num_out, num_in)
    return weight, {
        "weight_packed": pack(codes, 4),
        "weight_scale": torch.from_numpy(scales),
        "weight_zero_point": pack(zeros.T, 4).T,
        "weight_shape": torch.tensor([num_out, num_in]),
    }


_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
MIXTURES: dict[str, Mixture] = {
    "gpt_oss mxfp4": Mixture(
        lambda: GptOssConfig(**_SIZES, num_local_experts=3, num_experts_per_tok=2, sliding_window=8),
        None,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
    ),
    "qwen3_moe fp8": Mixture(
        lambda: Qwen3MoeConfig(**_SIZES, **_ROUTED, num_experts=4),
        _float8,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(2))],
        },
    ),
    "deepseek_v3 fp8": Mixture(
        lambda: DeepseekV3Config(**_SIZES | _LATENT, **_ROUTED, n_routed_experts=4, n_shared_experts=1),
        _float8,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
    ),
    "mixtral compressed": Mixture(
        lambda: MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
        _packed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _GROUPS}},
            "ignore": ["lm_head", "re:.*block_sparse_moe.gate"],
        },
    ),
    "mixtral awq": Mixture(
        lambda: MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "modules_to_not_convert": ["gate"]},
    ),
    "qwen3_moe gptq": Mixture(
        lambda: Qwen3MoeConfig(**_SIZES, **_ROUTED, num_experts=4),
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "modules_to_not_convert": ["mlp.gate"]},
    ),
}
"""By the model's type and the method."""


def write_mixture(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint and one of the numbers that its codes stand for; return their folders."""
    mixture, rng = MIXTURES[name], np.random.default_rng(0)
    plain, coded = folder / "plain", folder / "coded"
    save(AutoModelForCausalLM, mixture.config(), str(plain))
    save(AutoModelForCausalLM, mixture.config(), str(coded))
    numbers = load_file(plain / FILE)
    stored = dict(numbers)
    for tensor, weight in numbers.items():
        if mixture.make is None and tensor.endswith(("experts.gate_up_proj", "experts.down_proj")):
            numbers[tensor], parts = _mxfp4(rng, *weight.shape)
            stored |= {f"{tensor}_{leaf}": part for leaf, part in parts.items()}
            del stored[tensor]
        elif mixture.make is not None and ".layers." in tensor and weight.ndim == 2 and "gate.weight" not in tensor:
            found, parts = mixture.make(rng, *weight.shape)
            numbers[tensor] = torch.from_numpy(found).float()
            del stored[tensor]
            stored |= {f"{tensor.removesuffix('.weight')}.{leaf}": part for leaf, part in parts.items()}
    for place, tensors in ((plain, numbers), (coded, stored)):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, place / FILE, {"format": "pt"})
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps(config | {"quantization_config": mixture.quantised}))
    return coded, plain


def _mxfp4(rng: np.random.Generator, num_experts: int, num_in: int, num_out: int) -> tuple[Tensor, Parts]:
    """Return random weights of experts as the model has them, ``[experts, in, out]``, and the tensors of the file."""
    codes = rng.integers(0, 16, (num_experts, num_out, num_in))
    scales = rng.integers(121, 125, (num_experts, num_out, num_in // 32))
    octets = np.zeros((num_experts, num_out, num_in // 32, 16), np.uint8)
    weight = np.zeros((num_experts, num_in, num_out))
    for expert, output, column in np.ndindex(codes.shape):
        code = int(codes[expert, output, column])
        octets[expert, output, column // 32, column % 32 // 2] |= code << 4 * (column % 2)
        weight[expert, column, output] = _e2m1(code) * 2.0 ** (int(scales[expert, output, column // 32]) - 127)
    parts = {"blocks": torch.from_numpy(octets), "scales": torch.from_numpy(scales.astype(np.uint8))}
    return torch.from_numpy(weight).float(), parts
