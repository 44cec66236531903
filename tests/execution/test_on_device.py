"""Whole steps on the device at hand: graphs against launches against torch, and tokens beside loads and evictions.

Without a GPU they are left out, but for a rehearsal (``ON_DEVICE=cpu``), which takes half a minute in the interpreter.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from live_executor import BLOCK, KERNELS, executor_of, load, load_all, run, sequence
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel
from triton_cases import DEVICE, DTYPES

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, Tier
from manylora.execution.build import build_parts

pytest.importorskip("triton")

on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
if DEVICE.type != "cuda" and os.environ.get("ON_DEVICE") != "cpu":
    pytest.skip("needs a CUDA device", allow_module_level=True)

NUM_PAGES = 256

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {"llama": LlamaConfig(**SIZES), "mixtral": MixtralConfig(**SIZES, num_local_experts=4)}
RANKS = {"one": 3, "two": 20, "three": 8}
"""Ranks of the adapters; the first fills no tile, the second two."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def save(path: Path, family: str, dtype: str) -> None:
    """Save a small model of random weights and its adapters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=DTYPES[dtype])
    model.save_pretrained(path / "base")
    for seed, (name, rank) in enumerate(RANKS.items()):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(2):
            for module in ("q_proj", "v_proj", "o_proj"):
                linear = model.get_submodule(f"model.layers.{layer}.self_attn.{module}")
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, linear.in_features, generator=generator) / 8
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(linear.out_features, rank, generator=generator) / 8
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj", "o_proj"]}
        if family == "mixtral" and name != "three":
            tensors |= expert_tensors(model, rank, generator)
            config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
        (path / name).mkdir()
        save_file(tensors, path / name / "adapter_model.safetensors")
        (path / name / "adapter_config.json").write_text(json.dumps(config))


def expert_tensors(model: PreTrainedModel, rank: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random LoRA of all experts, named as PEFT does where it adapts both weights."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            num, num_out, num_in = parameter.shape
            inside = ".base_layer" if name.endswith("gate_up_proj") else ""
            prefix = f"base_model.model.{name.rpartition('.')[0]}{inside}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(num * rank, num_in, generator=generator) / 8
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_out, num * rank, generator=generator) / 8
    return tensors


def build(path: Path, kernels: str, dtype: str, device: str = DEVICE.type) -> EngineParts:
    config = EngineConfig(
        model=ModelConfig(model=str(path / "base"), device=device, dtype=dtype, **KERNELS[kernels]),
        memory=MemoryConfig(block_size=BLOCK, num_pages=NUM_PAGES),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
    )
    return build_parts(config, WallClock())


def load_ranks(parts: EngineParts, path: Path) -> dict[str, AdapterVersion]:
    return load_all(parts, {name: path / name for name in RANKS})


TOKENS = [[(7 * i + 5 * s + 1) % 100 for i in range(24)] for s in range(4)]

STEPS = (
    ((0, 0, 3), (1, 0, 6)),
    ((0, 3, 8), (1, 6, 1), (2, 0, 5)),  # a prompt goes on beside one that decodes, and one that begins
    ((1, 7, 1), (2, 5, 1), (0, 11, 1)),
    ((3, 0, 9), (0, 12, 1), (2, 6, 1), (1, 8, 1)),
    ((0, 13, 1), (1, 9, 1), (2, 7, 1), (3, 9, 1)),
)
"""Steps: the number of a sequence, its first token in the step, and its tokens there."""


def logits_of(parts: EngineParts, versions: dict[str, AdapterVersion]) -> list[torch.Tensor]:
    keys = [None, versions["one"].key, versions["two"].key, versions["one"].key]
    return [
        run(parts, *(sequence(TOKENS[s], at, count, 8 * s, keys[s], seq_id=s) for s, at, count in step)).float().cpu()
        for step in STEPS
    ]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        pytest.param("llama", "bfloat16", marks=on_gpu),
        ("mixtral", "float32"),
        pytest.param("mixtral", "bfloat16", marks=on_gpu),
    ],
)
def test_graphs_and_launches_give_the_logits_of_torch(family: str, dtype: str, tmp_path: Path) -> None:
    save(tmp_path, family, dtype)
    found = {}
    for kernels in KERNELS:
        # Without tables a GPU serves no LoRA of experts. In 16 bits a CPU's routers may choose others.
        is_here = family == "llama" or kernels != "torch"
        if not is_here and dtype != "float32":
            continue
        parts = build(tmp_path, kernels, dtype, DEVICE.type if is_here else "cpu")
        try:
            versions = load_ranks(parts, tmp_path)
            found[kernels] = logits_of(parts, versions)
            if kernels == "graphs" and family == "llama":  # every shape is captured by now: these are replays
                for again, first in zip(logits_of(parts, versions), found[kernels], strict=True):
                    assert torch.equal(again, first)
        finally:
            parts.close()
    reference = found.get("torch", found["triton"])
    for kernels in ("triton", "graphs"):
        for rows, expected in zip(found[kernels], reference, strict=True):
            error = (rows - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCE[dtype], kernels


@pytest.mark.parametrize("num_rounds", [1, pytest.param(50, marks=on_gpu)])
def test_tokens_beside_loads_and_evictions_are_those_of_a_quiet_engine(num_rounds: int, tmp_path: Path) -> None:
    """An adapter is loaded and dropped without a pause, into pages beside those that steps read."""
    save(tmp_path, "llama", "float32")
    parts = build(tmp_path, "graphs", "float32")
    try:
        versions = load_ranks(parts, tmp_path)
        quiet = logits_of(parts, versions)
        last, is_done = versions["three"], threading.Event()
        pages = tuple(range(NUM_PAGES - 1, NUM_PAGES - 1 - last.num_pages, -1))
        num_loads = 0

        def churn() -> None:
            nonlocal num_loads
            while not is_done.is_set():
                parts.executor.drop_adapter(last.key, Tier.DEVICE)
                assert load(parts, last, Tier.DEVICE, pages) is None
                num_loads += 1

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(num_rounds):
                for rows, expected in zip(logits_of(parts, versions), quiet, strict=True):
                    assert torch.equal(rows, expected)
        finally:
            is_done.set()
            thread.join()
        assert num_loads and last.key in executor_of(parts).runner.resident
    finally:
        parts.close()
