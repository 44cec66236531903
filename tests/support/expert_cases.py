"""Adapters of a mixture's experts and routers, as PEFT saves them, and as it did before transformers 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from parity_cases import _load, _quiet
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

__all__ = ["EXPERT_KINDS", "make_expert_adapters", "write_single_experts"]

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
}
"""``single`` has a pair for each linear of each expert."""

_FORMER = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "olmoe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Architectures whose linears of those names are all of experts, with the module around the experts."""


def make_expert_adapters(architecture: str, model_path: Path, path: Path) -> dict[str, Path]:
    """Save one adapter of each kind with random weights; return their directories by name."""
    folders = {}
    for seed, (kind, options) in enumerate(EXPERT_KINDS.items()):
        torch.manual_seed(500 + seed)
        if kind == "single":
            if architecture in _FORMER:
                folders[kind] = write_single_experts(architecture, model_path, path / kind, **options)
            continue
        with _quiet():
            tuned = get_peft_model(_load(model_path), LoraConfig(**options, task_type="CAUSAL_LM"))
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
    around, (gate, up, down) = _FORMER[architecture]
    hidden, inner = config.hidden_size, getattr(config, "moe_intermediate_size", config.intermediate_size)
    num_experts = config.num_local_experts if architecture == "mixtral" else config.num_experts
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, num_in: int, num_out: int) -> None:
        tensors[f"base_model.model.{name}.lora_A.weight"] = 0.15 * torch.randn(r, num_in)
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.15 * torch.randn(num_out, r)

    for layer in range(config.num_hidden_layers):
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
        "target_modules": ["gate", gate, up, down],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
