"""Adapters with random weights, for measurements: answers are noise, costs are real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from manylora.core.adapters.shape import BaseShape

__all__ = ["write_synthetic_adapter"]

SCALE = 0.01
"""Size of the weights: small, so that sums over many layers stay finite in every precision."""


def write_synthetic_adapter(
    folder: Path, base: BaseShape, rank: int, rng: np.random.Generator, *, targets: Sequence[str] | None = None
) -> Path:
    """Write an adapter as PEFT would, float32.

    Args:
        folder: The adapter's folder; made if it is not there.
        base: The base it is for.
        rank: Rank of every module.
        rng: Draws the weights.
        targets: Last names of the modules to change; every linear but the head when ``None``.

    Returns:
        The folder.
    """
    names = set(base.all_linear)
    modules = [one for one in base.modules if one.name in names]
    if targets is not None:
        modules = [one for one in modules if one.name.rpartition(".")[2] in targets]
    tensors = {}
    for module in modules:
        path = f"base_model.model.{module.name}"
        for half, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
            weights = rng.standard_normal(shape, dtype=np.float32) * np.float32(SCALE)
            tensors[f"{path}.lora_{half}.weight"] = weights
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.name.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder
