"""Adapters of a mixture's experts and routers, as PEFT saves them, and as it did before transformers 5."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from parity_cases import _load, _quiet, parts_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig

__all__ = ["EXPERT_KINDS", "make_expert_adapters", "write_blocks", "write_single_experts"]

_BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

EXPERT_KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]},
    "all-linear": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "experts": {"r": 4, "lora_alpha": 4, "target_modules": [], "target_parameters": _BOTH},
    "down": {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
    "gate-up": {
        "r": 5,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": ["gate_up_proj"],
        "rank_pattern": {r".*\.1\.mlp\.experts\.gate_up_proj": 17},
    },
    "router": {"r": 3, "lora_alpha": 6, "target_modules": ["k_proj"], "target_parameters": ["gate.weight"]},
    "single": {"r": 3, "lora_alpha": 6},
    "blocks": {"r": 3, "lora_alpha": 6},
}
"""``single`` has a pair for each linear of each expert; ``blocks`` has pairs of shared experts and dense layers too."""

_FORMER = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
_OTHERS = ("mlp", ("gate_proj", "up_proj", "down_proj"))
"""The module around the experts, and their linears, by architecture; and of all others."""

_SHARED = r".*\.mlp\.(gate|experts\.(\d+\.)?(gate|up|down)_proj)"
"""The targets where dense layers and shared experts have linears of these names too: PEFT leaves them out."""

_DENSE = r"\d+\.mlp\.(shared_experts\.)?(gate|up|down)_proj"
"""The linears of dense layers and shared experts, by their names in the list of layers."""


def make_expert_adapters(architecture: str, model_path: Path, path: Path) -> dict[str, Path]:
    """Save one adapter of each kind with random weights; return their directories by name."""
    folders, base = {}, _load(model_path)
    for seed, (kind, options) in enumerate(EXPERT_KINDS.items()):
        torch.manual_seed(500 + seed)
        if kind == "single":
            folders[kind] = write_single_experts(architecture, model_path, path / kind, **options)
            continue
        if kind == "blocks":
            if _has_others(AutoConfig.from_pretrained(model_path)):
                folders[kind] = write_blocks(architecture, model_path, path / kind, **options)
            continue
        with _quiet():
            tuned = get_peft_model(deepcopy(base), LoraConfig(**options, task_type="CAUSAL_LM"))
            for name, parameter in tuned.named_parameters():
                if "lora_" in name:
                    parameter.data.normal_(std=0.15)
            tuned.save_pretrained(path / kind, save_embedding_layers=False)
        if kind == "down":
            file = path / kind / "adapter_model.safetensors"
            save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file)
        folders[kind] = path / kind
    return folders


def write_single_experts(architecture: str, model_path: Path, folder: Path, *, r: int, lora_alpha: int) -> Path:
    """Write an adapter as it was trained on the linears of single experts; return its folder."""
    config = AutoConfig.from_pretrained(model_path)
    around, (gate, up, down) = _FORMER.get(architecture, _OTHERS)
    hidden, inner = config.hidden_size, getattr(config, "moe_intermediate_size", config.intermediate_size)
    names = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
    num_experts = next(getattr(config, name) for name in names if hasattr(config, name))
    first = getattr(config, "first_k_dense_replace", getattr(config, "moe_layer_start_index", 0))
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, num_in: int, num_out: int) -> None:
        tensors[f"base_model.model.{name}.lora_A.weight"] = 0.15 * torch.randn(r, num_in)
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.15 * torch.randn(num_out, r)

    for layer in range(first, config.num_hidden_layers):
        block = f"model.layers.{layer}.{around}"
        add(f"{block}.gate", hidden, num_experts)
        for expert in range(num_experts):
            add(f"{block}.experts.{expert}.{gate}", hidden, inner)
            add(f"{block}.experts.{expert}.{up}", hidden, inner)
            add(f"{block}.experts.{expert}.{down}", inner, hidden)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": lora_alpha,
        "target_modules": _SHARED if _has_others(config) else ["gate", gate, up, down],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write_blocks(architecture: str, model_path: Path, folder: Path, *, r: int, lora_alpha: int) -> Path:
    """Write an adapter as it was trained on all linears of mixtures' blocks and dense layers; return its folder.

    PEFT leaves out shared experts and dense layers where it turns single experts into parameters. So its reference,
    ``peft_model``, has the same tensors in two parts.
    """
    layers, last = parts_of(folder)
    routed = write_single_experts(architecture, model_path, last, r=r, lora_alpha=lora_alpha)
    with _quiet():
        tuned = get_peft_model(
            _load(model_path).model.layers, LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=_DENSE)
        )
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.15)
        tuned.save_pretrained(layers)
    tensors = load_file(routed / "adapter_model.safetensors")
    num_routed = len(tensors)
    for name, tensor in load_file(layers / "adapter_model.safetensors").items():
        tensors[name.replace("base_model.model.", "base_model.model.model.layers.")] = tensor
    assert len(tensors) - num_routed == 2 * 3 * 2, "of a dense layer and of a layer with shared experts"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = json.loads((routed / "adapter_config.json").read_text())
    settings["target_modules"] = ["gate", *_OTHERS[1]]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _has_others(config: PreTrainedConfig) -> bool:
    """Whether linears of dense layers or shared experts have the names of those of experts."""
    return bool(getattr(config, "n_shared_experts", 0) or getattr(config, "moe_num_shared_experts", 0))
