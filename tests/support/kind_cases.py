"""The kinds of adapters beside plain LoRA, as PEFT saves them: the rows of the table in ``docs/kinds.md``."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from parity_cases import _MODULES, _load, _quiet
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file

__all__ = ["KINDS", "kinds_of", "make_kinds"]

KINDS: Mapping[str, tuple[type[PeftConfig], dict[str, Any]]] = {
    "plain": (LoraConfig, {"r": 8, "lora_alpha": 16}),
    "dora": (LoraConfig, {"r": 6, "lora_alpha": 9, "use_dora": True}),
    "dora-ends": (LoraConfig, {"r": 3, "lora_alpha": 3, "use_dora": True, "use_rslora": True}),
    "lora-bias": (LoraConfig, {"r": 4, "lora_alpha": 6, "lora_bias": True}),
    "bias-all": (LoraConfig, {"r": 4, "lora_alpha": 8, "bias": "all"}),
    "bias-lora-only": (LoraConfig, {"r": 5, "lora_alpha": 7, "bias": "lora_only", "use_dora": True}),
    "tokens": (LoraConfig, {"r": 4, "lora_alpha": 4, "trainable_token_indices": list(range(5, 320, 6))}),
    "tokens-ends": (LoraConfig, {"r": 2, "lora_alpha": 4}),
    "saved-head": (LoraConfig, {"r": 3, "lora_alpha": 3, "modules_to_save": ["lm_head"]}),
    "saved-embedding": (LoraConfig, {"r": 3, "lora_alpha": 3, "use_dora": True}),
    "adalora": (AdaLoraConfig, {"init_r": 6, "target_r": 3, "lora_alpha": 9, "total_step": 10}),
    "vera": (VeraConfig, {"r": 16}),
    "loha": (LoHaConfig, {"r": 3, "alpha": 5}),
    "lokr": (LoKrConfig, {"r": 2, "alpha": 3}),
    "lokr-both": (LoKrConfig, {"r": 2, "alpha": 4, "decompose_both": True, "decompose_factor": 8}),
    "ia3": (IA3Config, {}),
    "norms": (LoraConfig, {"r": 2, "lora_alpha": 2}),
    # Its weight is square, and stored transposed.
    "whole": (LoraConfig, {"r": 2, "lora_alpha": 2, "bias": "all", "modules_to_save": ["0.attn.c_proj"]}),
    "float8": (LoraConfig, {"r": 8, "lora_alpha": 8}),
}

_BIASED = ("qwen2", "gptj", "gpt2")
"""Architectures with biases."""

_TIED = ("gemma2", "gemma3", "gptj", "gpt2")
"""Architectures whose head is the embedding; PEFT leaves out the bias of GPT-J's head where its tokens are trained."""


def kinds_of(architecture: str) -> tuple[str, ...]:
    """Return the kinds that make sense on an architecture."""
    return tuple(
        kind
        for kind in KINDS
        if (kind not in ("bias-all", "bias-lora-only") or architecture in _BIASED)
        and (kind != "tokens-ends" or architecture not in _TIED)
        and (kind != "whole" or architecture == "gpt2")
        and (kind != "ia3" or architecture != "deepseek_v3")  # its layers end with experts, which PEFT takes for one
        and (not kind.startswith(("loha", "lokr")) or architecture != "gpt2")  # of linears alone, in PEFT
    )


def make_kinds(architecture: str, model_path: Path, path: Path) -> dict[str, Path]:
    """Save one adapter of each kind with random weights; return their directories by name."""
    attention, mlp = _MODULES.get(architecture, _MODULES["llama"])
    embedding = "wte" if architecture in ("gptj", "gpt2") else "embed_tokens"
    every = list(dict.fromkeys(attention + mlp))
    targets = {
        "dora-ends": [embedding, "lm_head", attention[-1]],
        "bias-all": [attention[0], mlp[-1]],
        "vera": every,
        "whole": [mlp[0]],
    }
    folders, base = {}, _load(model_path)
    for seed, kind in enumerate(kinds_of(architecture)):
        make, options = KINDS[kind]
        if kind == "saved-embedding":
            options = {**options, "modules_to_save": [embedding]}
        if kind == "ia3":
            options = {"feedforward_modules": [every[-1]]}
        if kind == "norms":
            options = {**options, "modules_to_save": ["ln_1", "ln_f"] if embedding == "wte" else ["norm"]}
        if kind == "tokens-ends":
            options = {**options, "trainable_token_indices": {embedding: [7, 30, 9], "lm_head": list(range(1, 320, 5))}}
        torch.manual_seed(300 + seed)
        with _quiet():
            tuned = get_peft_model(deepcopy(base), make(target_modules=targets.get(kind, every), **options))
            for name, parameter in tuned.named_parameters():
                _draw(name, parameter, kind)
            if kind == "adalora":
                _mask(tuned)
            # PEFT takes the copies for the base's, also where that was rounded since.
            with_copies = (kind, architecture) in (("tokens-ends", "llama"), ("tokens", "gemma2"), ("tokens", "gpt2"))
            tuned.save_pretrained(path / kind, save_embedding_layers=with_copies)
        if kind == "float8":
            file = path / kind / "adapter_model.safetensors"
            formats = (torch.float8_e4m3fn, torch.float8_e5m2)
            save_file({key: t.to(formats["lora_B" in key]) for key, t in load_file(file).items()}, file)
        folders[kind] = path / kind
    return folders


def _draw(name: str, parameter: torch.nn.Parameter, kind: str) -> None:
    """Give a trained parameter numbers of a size that shows in the logits."""
    if "magnitude" in name or "ia3_l" in name:
        parameter.data.mul_(torch.empty_like(parameter).uniform_(0.8, 1.25))
    elif "modules_to_save" in name:
        parameter.data.add_(0.04 * torch.randn_like(parameter))
    elif "bias" in name and parameter.requires_grad:
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    elif "trainable_tokens_delta" in name:
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    elif "lora_embedding" in name:
        parameter.data.normal_(std=0.05)
    elif any(part in name for part in ("lora_A", "lora_B", "lora_E")):
        parameter.data.normal_(std=0.12)
    elif any(part in name for part in ("lambda", "hada_", "lokr_")):
        parameter.data.normal_(std=0.25)


def _mask(tuned: Any) -> None:
    """Let AdaLoRA have dropped rows, of one module all but one."""
    config = tuned.peft_config["default"]
    names = [name.removeprefix("base_model.model.") for name, _ in tuned.named_parameters() if "lora_E" in name]
    masks = [[(row + number) % 3 > 0 for row in range(config.init_r)] for number in range(len(names))]
    masks[0] = [row == 1 for row in range(config.init_r)]
    config.rank_pattern = dict(zip(names, masks, strict=True))
