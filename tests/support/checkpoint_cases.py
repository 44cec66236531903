"""Tiny base checkpoints, written as people store them, and what their weights are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from manylora.execution.checkpoint.codes import Codes
from manylora.execution.checkpoint.open import Checkpoint, open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 128,
}
"""Linears of 40, 72 and 96 inputs and outputs."""

FILE = "model.safetensors"


def numbers_of(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a weight as numbers: as stored, or float32 if it is stored as codes."""
    weight = checkpoint.linear(name)
    return weight.dequantise() if isinstance(weight, Codes) else weight


def tiny(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES | changes)


def build(config: PreTrainedConfig, seed: int = 0) -> nn.Module:
    """Return a model whose norms are no ones."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    return model


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears inside layers, by their names."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and name != "lm_head"}


def write(folder: Path, config: PreTrainedConfig, tensors: Mapping[str, Tensor], quantised: Any) -> Path:
    """Write a folder with such a ``quantization_config``."""
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})
    return folder


def write_modules(folder: Path, make: Callable[[int, int], dict[str, Tensor]], quantised: Any) -> Path:
    """Write a Llama whose linears inside layers are stored as ``make(out, in)`` says, by the names beside a module."""
    model = build(tiny())
    tensors = dict(model.state_dict())
    for name, linear in linears(model).items():
        del tensors[f"{name}.weight"]
        parts = make(linear.out_features, linear.in_features)
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in parts.items()}
    return write(folder, tiny(), tensors, quantised)


def check_weights(
    folder: Path, expected: Mapping[str, Tensor], *, relative: float = 0.0, absolute: float = 0.0
) -> dict[str, Codes]:
    """Compare a checkpoint's weights with those expected; return the codes of those that have some."""
    checkpoint = open_checkpoint(str(folder))
    assert set(checkpoint.names) == set(expected)
    codes = {}
    for name, weight in expected.items():
        found = checkpoint.linear(name)
        if isinstance(found, Codes):
            codes[name] = found
            groups = -(-weight.shape[1] // found.group)
            assert found.codes.dtype is torch.uint8
            assert found.codes.shape == weight.shape
            assert found.scales.shape == (weight.shape[0], groups)
            assert found.shifts is None or (found.shifts.dtype, found.shifts.shape) == (
                torch.float32,
                found.scales.shape,
            )
        numbers = numbers_of(checkpoint, name).float()
        torch.testing.assert_close(
            numbers, weight.float(), rtol=relative, atol=absolute, msg=lambda m, n=name: f"{n}: {m}"
        )
    checkpoint.weights.close()
    return codes


def pack(codes: np.ndarray[Any, Any], bits: int, order: list[int] | None = None) -> Tensor:
    """Pack along the last axis into words of 32 bits, code by code."""
    each = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // each)), np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            for place in range(each):
                column = word * each + (order[place] if order else place)
                if column < columns:
                    words[row, word] |= np.uint32(int(codes[row, column]) << (bits * place))
    return torch.from_numpy(words.view(np.int32))


def file_of(tensor: Tensor) -> str | None:
    """Return the file whose mapping a tensor's bytes are in; ``None`` if they are a copy."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, _, _, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(place, 16) for place in places.split("-"))
        if begin <= tensor.data_ptr() < end:
            return Path(path[0]).name if path and path[0].startswith("/") else None
    return None


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file, whose metadata stays."""
    from safetensors import safe_open

    with safe_open(folder / FILE, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the ``quantization_config`` of a checkpoint."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
