"""A step in few launches: which parts of which families are replaced, that the logits stay, and how few they are."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch_counter import counted_launches
from live_executor import executor_of, run, sequence
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)
from triton_cases import DEVICE, DTYPES, HALVES

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.plan import StepPlan
from manylora.core.ports import EngineParts
from manylora.execution.attention.call import ATTENTION_NAME, attending, register_attention
from manylora.execution.build import build_parts
from manylora.execution.fusion.layers import fuse_launches, fuse_norms
from manylora.execution.fusion.replace import Echo
from manylora.execution.model.load import LoadedModel
from manylora.execution.storage.adapter_files import InlineReader

pytest.importorskip("triton")

HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TWO = {**SMALL, "num_hidden_layers": 2}

# What is replaced: norms, rotations left to attention, gates, layers whose sums and norms are one.
FAMILIES: dict[str, tuple[PreTrainedConfig, tuple[int, int, int, int]]] = {
    "llama, angles scaled": (LlamaConfig(**TWO, rope_parameters=YARN), (5, 2, 2, 2)),
    "qwen3": (Qwen3Config(**SMALL, head_dim=12), (5, 1, 1, 1)),
    "phi3, half of each head": (Phi3Config(**SMALL, rope_parameters=HALF), (3, 1, 1, 1)),
    "mixtral": (MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), (3, 1, 0, 1)),
    "smollm3, the second layer without rotation": (SmolLM3Config(**TWO, no_rope_layers=[1, 0]), (5, 1, 2, 2)),
    "gemma3, more norms": (
        Gemma3TextConfig(**TWO, head_dim=8, layer_types=["full_attention", "sliding_attention"]),
        (13, 2, 2, 2),
    ),
    "olmo2, norms behind": (Olmo2Config(**SMALL), (5, 1, 1, 0)),
    "granite, sums scaled": (GraniteConfig(**SMALL, residual_multiplier=0.5), (3, 1, 1, 0)),
    "cohere, neighbours rotated": (CohereConfig(**SMALL), (0, 0, 1, 0)),
    "glm4, neighbours rotated": (Glm4Config(**SMALL, head_dim=8), (5, 0, 1, 0)),
    "phi, joined after rotating": (PhiConfig(**SMALL), (0, 0, 0, 0)),
    "hunyuan, normalised after rotating": (HunYuanDenseV1Config(**SMALL, head_dim=8), (5, 0, 1, 1)),
    "ministral3, queries scaled after rotating": (Ministral3Config(**SMALL, head_dim=8), (3, 0, 1, 1)),
}


def make_model(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.requires_grad_(False).eval().to(DEVICE)


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.tensor([[3, 14, 15]], device=DEVICE)
    positions = torch.tensor([[0, 7, 40]], device=DEVICE)
    with attending(Echo()):
        found: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_replaced_and_that_nothing_changes_by_it(family: str, caplog: pytest.LogCaptureFixture) -> None:
    config, replaced = FAMILIES[family]
    model = make_model(config, torch.float32)
    expected = logits(model)
    with caplog.at_level(logging.INFO):
        fuse_launches(model)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    (counts,) = re.findall(r"launches_fused norms=(\d+) rotations=(\d+) gates=(\d+) residuals=(\d+)", caplog.text)
    assert tuple(map(int, counts)) == replaced


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_no_reason_to_refuse(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(FAMILIES["qwen3"][0], DTYPES[dtype])
    with caplog.at_level(logging.INFO):
        fuse_launches(model)
    assert "norms=5 rotations=1 gates=1 residuals=1" in caplog.text


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check at start, which other tests look at and which takes an interpreter seconds."""
    monkeypatch.setattr("manylora.execution.build.check_sequences_are_separate", lambda *args: None)


def build(config: PreTrainedConfig, kernels: str, dtype: torch.dtype = torch.float32) -> EngineParts:
    def load(_: ModelConfig) -> LoadedModel:
        model = make_model(config, dtype)
        return LoadedModel(name="random", model=model, text_config=model.config, dtype=dtype, device=DEVICE)

    chosen = {"torch": ("grouped", "torch"), "triton": ("ragged", "triton")}[kernels]
    options = ModelConfig(
        model="random",
        device=DEVICE.type,
        lora_kernel=chosen[0],
        attention_kernel=chosen[1],
        decode_graphs="off",  # a replay would launch nothing that can be counted
    )
    memory, scheduler = MemoryConfig(block_size=4, num_pages=32), SchedulerConfig(max_num_seqs=4)
    engine = EngineConfig(model=options, memory=memory, scheduler=scheduler)
    return build_parts(engine, WallClock(), load=load, readers=[InlineReader()])


@pytest.mark.usefixtures("quick_start")
def test_the_engine_rotates_half_a_head_as_torch_does() -> None:
    config, _ = FAMILIES["phi3, half of each head"]
    rows = [sequence([5, 8, 13, 21], 0, 4, 0, None, seq_id=0), sequence([34, 15, 9], 0, 3, 8, None, seq_id=1)]
    found = {}
    for kernels in ("torch", "triton"):
        parts = build(config, kernels)
        try:
            found[kernels] = run(parts, *rows)
        finally:
            parts.close()
    torch.testing.assert_close(found["triton"], found["torch"], atol=1e-4, rtol=1e-4)


def launches(layers: int, num_kv_heads: int, num_sequences: int) -> Counter[str]:
    """Return those of a step that decodes."""
    # Half precision: there a norm in plain torch converts, too.
    config = {**SMALL, "num_hidden_layers": layers, "num_key_value_heads": num_kv_heads}
    parts = build(LlamaConfig(**config), "triton", torch.float16)
    rows = tuple(sequence([1, 2, 3], 2, 1, 8 * s, None, seq_id=s) for s in range(num_sequences))
    try:
        with counted_launches() as counts:
            executor_of(parts).runner.run(StepPlan(step_id=1, sequences=rows))
    finally:
        parts.close()
    return counts


def norms_only(model: nn.Module) -> None:
    fuse_norms(model)


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize(
    ("fuse", "num_launches"), [(lambda model: None, 36), (norms_only, 22), (None, 9)], ids=["plain", "norms", "all"]
)
def test_launches_of_a_layer(
    fuse: Callable[[nn.Module], None] | None, num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What documents say of Llama's layer: what one more of them adds to a step that decodes."""
    if fuse is not None:
        monkeypatch.setattr("manylora.execution.build.fuse_launches", fuse)
    added = launches(2, 2, 2) - launches(1, 2, 2)
    assert added.total() == num_launches, added
    if fuse is None:
        assert added == {
            "linear": 4,
            "triton store": 1,
            "triton attend": 1,
            "triton rms_norm": 2,
            "triton activate": 1,
        }


@pytest.mark.usefixtures("quick_start")
def test_a_cut_context_takes_a_launch_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.execution.attention.triton.LEAST_PART", 1)
    assert launches(1, 1, 1)["triton combine"] == 1
