"""A tiny base, valid adapters for it, and a corpus of everything that can be wrong with one.

Needs neither torch nor PEFT. Unit tests read the corpus directly; server tests upload it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from manylora.adapters.shape import BaseShape, ModuleKind, PageShape, TargetModule

__all__ = ["tiny_base", "write_good_adapter"]


def tiny_base(
    *,
    num_layers: int = 2,
    hidden: int = 32,
    intermediate: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    max_model_len: int = 128,
    fingerprint: str = "tiny-llama",
    unsupported: tuple[tuple[str, str], ...] = (),
) -> BaseShape:
    """The shape of a small Llama, with the module names its ``transformers`` class has."""
    head_dim = hidden // heads
    modules: list[TargetModule] = []

    def add(
        name: str, ins: int, outs: int, layer: int | None, group: str, offset: int = 0, embed: bool = False
    ) -> None:
        kind = ModuleKind.EMBEDDING if embed else ModuleKind.LINEAR
        modules.append(
            TargetModule(
                name=name, kind=kind, in_features=ins, out_features=outs, layer=layer, group=group, offset=offset
            )
        )

    add("model.embed_tokens", vocab, hidden, None, "model.embed_tokens", embed=True)
    for i in range(num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        q, kv = heads * head_dim, kv_heads * head_dim
        add(f"{attention}.q_proj", hidden, q, i, f"{attention}.qkv")
        add(f"{attention}.k_proj", hidden, kv, i, f"{attention}.qkv", q)
        add(f"{attention}.v_proj", hidden, kv, i, f"{attention}.qkv", q + kv)
        add(f"{attention}.o_proj", q, hidden, i, f"{attention}.o_proj")
        add(f"{mlp}.gate_proj", hidden, intermediate, i, f"{mlp}.gate_up")
        add(f"{mlp}.up_proj", hidden, intermediate, i, f"{mlp}.gate_up", intermediate)
        add(f"{mlp}.down_proj", intermediate, hidden, i, f"{mlp}.down_proj")
    add("lm_head", hidden, vocab, None, "lm_head")
    return BaseShape(
        name="tiny-llama",
        architecture="llama",
        fingerprint=fingerprint,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=num_layers,
        max_model_len=max_model_len,
        page=PageShape(
            block_size=block_size,
            num_layers=num_layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            element_bytes=4 if dtype == "float32" else 2,
            dtype=dtype,
        ),
        modules=tuple(modules),
        all_linear=tuple(m.name for m in modules if m.kind is ModuleKind.LINEAR and m.name != "lm_head"),
        eos_token_ids=(2,),
        unsupported=unsupported,
    )


def adapter_config(
    rank: int = 8, targets: Sequence[str] | str = ("q_proj", "v_proj"), **changes: Any
) -> dict[str, Any]:
    """What PEFT writes into ``adapter_config.json``, with ``changes``."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "loftq_config": {},
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    return config | changes


def adapter_tensors(
    base: BaseShape, rank: int = 8, targets: Sequence[str] = ("q_proj", "v_proj"), seed: int = 0
) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Random weights for every module whose last name is a target, by PEFT's keys."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    for module in base.modules:
        if module.name.rpartition(".")[2] not in targets:
            continue
        a = rng.standard_normal((rank, module.in_features)).astype(np.float32) / 8
        b = rng.standard_normal((module.out_features, rank)).astype(np.float32) / 8
        key = f"base_model.model.{module.name}"
        if module.kind is ModuleKind.EMBEDDING:
            tensors[f"{key}.lora_embedding_A"], tensors[f"{key}.lora_embedding_B"] = a, b
        else:
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
    return tensors


def write_good_adapter(
    directory: Path,
    base: BaseShape,
    *,
    rank: int = 8,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a valid PEFT directory.

    Args:
        directory: Made if it is not there.
        base: The base it is for.
        rank: Rank of every module.
        targets: Last names of the modules.
        seed: Seed of the weights: equal seeds make equal adapters.
        changes: Settings that differ from PEFT's defaults.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config(rank, targets, **changes)))
    save_file(adapter_tensors(base, rank, targets, seed), directory / "adapter_model.safetensors")
    return directory
