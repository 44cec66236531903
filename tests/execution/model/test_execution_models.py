"""What is loaded, what is refused, and how a model is described."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import MODEL as SMALL
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV32Config,
    FalconConfig,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GraniteMoeConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from manylora.core.adapters.shape import BaseShape, ModuleKind
from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.build import build_parts
from manylora.execution.checkpoint.open import Checkpoint
from manylora.execution.kernels.linear import BaseLinear
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.kernels import LORA_KERNELS
from manylora.execution.model.describe import describe_model
from manylora.execution.model.load import context_limit
from manylora.execution.model.modules import FusedLinear, FusedPart, adapt_modules
from manylora.execution.storage.adapter_files import InlineReader


@pytest.fixture(autouse=True)
def quiet_saving() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


def save(config: PreTrainedConfig, path: Path) -> str:
    torch.manual_seed(0)
    model = (
        T5ForConditionalGeneration(config) if config.model_type == "t5" else AutoModelForCausalLM.from_config(config)
    )
    model.save_pretrained(path)
    return str(path)


def build(model: str, **options: object) -> BaseShape:
    memory = MemoryConfig(**{"block_size": 4, "num_pages": 64} | options)  # type: ignore[arg-type]
    config = ModelConfig(model=model, device="cpu")
    parts = build_parts(EngineConfig(model=config, memory=memory), WallClock(), readers=[InlineReader()])
    parts.close()
    return parts.base


def test_llama_is_described_as_peft_sees_it(tmp_path: Path) -> None:
    base = build(save(LlamaConfig(**SMALL), tmp_path))
    modules = {module.name: module for module in base.modules}
    layer = "model.layers.1"
    assert [modules[f"{layer}.self_attn.{x}_proj"].offset for x in "qkv"] == [0, 32, 48]
    assert {modules[f"{layer}.self_attn.{x}_proj"].group for x in "qkv"} == {f"{layer}.self_attn.qkv"}
    assert modules[f"{layer}.mlp.up_proj"].group == modules[f"{layer}.mlp.gate_proj"].group == f"{layer}.mlp.gate_up"
    assert modules[f"{layer}.mlp.up_proj"].offset == 48
    assert modules["lm_head"].layer is None and modules[f"{layer}.mlp.up_proj"].layer == 1
    linears = [module for module in base.modules if module.kind is ModuleKind.LINEAR]
    assert len(linears) == 2 * 7 + 1 and len(base.all_linear) == 2 * 7
    assert {name for name, module in modules.items() if module.kind is ModuleKind.NUMBERS} == {
        "model.norm",
        *(f"model.layers.{n}.{x}" for n in range(2) for x in ("input_layernorm", "post_attention_layernorm")),
        *(f"model.layers.{n}.mlp.down_proj.input" for n in range(2)),
    }
    assert "lm_head" not in base.all_linear
    assert base.eos_token_ids == (2,)
    assert base.max_model_len == 128
    assert (base.page.num_layers, base.page.num_kv_heads, base.page.head_dim) == (2, 2, 8)
    assert not base.unsupported


def test_fingerprint_follows_the_configuration_not_the_place(tmp_path: Path) -> None:
    first = build(save(LlamaConfig(**SMALL), tmp_path / "a"))
    second = build(save(LlamaConfig(**SMALL), tmp_path / "b"))
    other = build(save(LlamaConfig(**SMALL | {"rms_norm_eps": 1e-4}), tmp_path / "c"))
    assert first.fingerprint == second.fingerprint != other.fingerprint


def test_experts_and_routers_are_described(tmp_path: Path) -> None:
    path = save(MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), tmp_path)
    modules = {module.name: module for module in build(path).modules}
    both, down = (modules[f"model.layers.0.mlp.experts.{leaf}"] for leaf in ("gate_up_proj", "down_proj"))
    assert (both.kind, both.in_features, both.out_features, both.num_experts) == (ModuleKind.EXPERTS, 32, 96, 2)
    assert (down.kind, down.in_features, down.out_features, down.num_experts) == (ModuleKind.EXPERTS, 48, 32, 2)
    router = modules["model.layers.1.mlp.gate"]
    assert (router.kind, router.in_features, router.out_features) == (ModuleKind.ROUTER, 32, 2)


def test_experts_are_refused_by_name_where_kernels_do_not_find_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU without Triton."""

    def describe(*args: Any, **options: Any) -> BaseShape:
        return describe_model(*args, **options | {"adapts_experts": False})

    monkeypatch.setattr("manylora.execution.build.describe_model", describe)
    base = build(save(MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), tmp_path))
    assert "only kernels in Triton find them" in dict(base.unsupported)["model.layers.0.mlp.experts"]
    kinds = {module.kind for module in base.modules}
    assert ModuleKind.ROUTER in kinds and ModuleKind.EXPERTS not in kinds


def test_the_embedding_of_positions_takes_no_adapter(tmp_path: Path) -> None:
    """It is called once on every token, but with positions."""
    base = build(save(GPTBigCodeConfig(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=128), tmp_path))
    assert [module.name for module in base.modules if module.kind is ModuleKind.EMBEDDING] == ["transformer.wte"]
    assert "positions" in dict(base.unsupported)["transformer.wpe"]


def test_experts_whose_product_asks_for_strides_pass_the_probe(tmp_path: Path) -> None:
    base = build(save(GraniteMoeConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), tmp_path))
    assert sum(module.kind is ModuleKind.EXPERTS for module in base.modules) == 4


def test_of_a_multimodal_checkpoint_the_text_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An image's weights are not read, and no adapter may change them; the class is not one of causal models."""
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig(text_config=Qwen2Config(**SMALL, rope_parameters=rope).to_dict(), vision_config=vision)
    Qwen2VLForConditionalGeneration(config).save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="manylora.execution.model.load"):
        base = build(str(tmp_path))
    assert "text_only" in caplog.text and "skipped=visual" in caplog.text
    assert "model.language_model.layers.1.mlp.up_proj" in {module.name for module in base.modules}
    assert not [name for name, _ in base.unsupported if "visual" in name]


def test_a_mixture_that_cannot_be_served_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    path = save(DeepseekV32Config(**SMALL | experts | heads | groups), tmp_path)
    monkeypatch.setattr(Checkpoint, "linear", None)
    with pytest.raises(ConfigError, match="'deepseek_v32', which is not supported"):
        build(path)


def test_int8_kv_of_odd_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sizes of keys and values, 6 and 6"):
        build(save(LlamaConfig(**SMALL, head_dim=6), tmp_path), kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4), "encoder-decoder"),
        (MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4), "mamba"),
        (BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4), "bloom"),
        (FalconConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True), "alibi"),
        (Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True), "not causal"),
        (
            Mamba2Config(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8),
            "no layer has keys",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_unsupported_architecture_says_what_is_missing(config: PreTrainedConfig, words: str, tmp_path: Path) -> None:
    path = save(config, tmp_path)
    with pytest.raises(ConfigError, match=words):
        build(path)


def test_missing_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        build(str(tmp_path / "nowhere"))


def test_a_pool_too_small_for_the_context_shortens_it_unless_asked(tmp_path: Path) -> None:
    path = save(LlamaConfig(**SMALL), tmp_path)
    assert build(path, num_pages=10).max_model_len == 40
    config = EngineConfig(
        model=ModelConfig(model=path, device="cpu", max_model_len=100), memory=MemoryConfig(block_size=4, num_pages=10)
    )
    with pytest.raises(ConfigError, match="hold 40 tokens"):
        build_parts(config, WallClock(), readers=[InlineReader()])
    config = EngineConfig(model=ModelConfig(model=path, device="cpu", max_model_len=129))
    with pytest.raises(ConfigError, match="context is 128"):
        build_parts(config, WallClock(), readers=[InlineReader()])


def test_length_dependent_rope_is_served_up_to_the_trained_length() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = Phi3Config(
        **SMALL | {"max_position_embeddings": 512}, original_max_position_embeddings=64, rope_parameters=rope
    )
    assert context_limit(config) == 64
    assert context_limit(LlamaConfig(**SMALL)) == 128


def make_fused(*, has_bias: bool) -> tuple[list[nn.Linear], list[FusedPart]]:
    torch.manual_seed(0)
    linears = [nn.Linear(6, size, bias=has_bias) for size in (4, 3, 5)]
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = torch.cat([linear.bias.data for linear in linears]) if has_bias else None
    fused = FusedLinear(BaseLinear(weight, bias), [4, 3, 5], "group", StepContext(LORA_KERNELS["grouped"]))
    return linears, [FusedPart(fused, index, is_owner=index == 0) for index in range(3)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_fused_parts_may_be_called_in_any_order(order: tuple[int, ...], has_bias: bool) -> None:
    linears, parts = make_fused(has_bias=has_bias)
    for _ in range(3):
        x = torch.randn(1, 2, 6)
        for index in order:
            torch.testing.assert_close(parts[index](x), linears[index](x))


def test_fused_parts_do_not_hand_out_another_inputs_columns() -> None:
    linears, parts = make_fused(has_bias=True)
    x, y = torch.randn(1, 2, 6), torch.randn(1, 2, 6)
    for index, z in [(0, x), (0, y), (1, x), (1, y), (2, y)]:
        torch.testing.assert_close(parts[index](z), linears[index](z))


def test_a_model_that_mixes_tokens_outside_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution over tokens looks harmless to the probe; what comes out tells."""

    def adapt_and_mix(model: nn.Module, *args: Any) -> None:
        adapt_modules(model, *args)
        layer = model.get_submodule("model.layers.0.mlp")
        layer.register_forward_hook(lambda module, args, output: output + 0.1 * output.roll(1, dims=1))

    path = save(LlamaConfig(**SMALL), tmp_path)
    monkeypatch.setattr("manylora.execution.build.adapt_modules", adapt_and_mix)
    with pytest.raises(ConfigError, match="outside attention"):
        build(path)
