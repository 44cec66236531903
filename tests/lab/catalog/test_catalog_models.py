"""Dimensions, hardware and copies: sizes that can be looked up, and files that may be wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from manylora.core.adapters.layout import lay_out
from manylora.core.adapters.shape import BaseShape
from manylora.core.config import MIB
from manylora.core.errors import ConfigError
from manylora.core.types import AdapterKey, AdapterVersion
from manylora.lab.catalog.dims import ATTENTION_TARGETS, ModelDims
from manylora.lab.catalog.hardware import HARDWARE, Hardware, find_hardware
from manylora.lab.catalog.models import MODELS, base_shape, dims_from_config, find_dims
from manylora.lab.costs.adapters import COPY_PATHS, adapter_targets, copy_time_s, find_copy_path
from manylora.lab.costs.roofline import RooflineCost, memory_for_pool
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.workloads import AdapterSpec

QWEN_2_5_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}


def version(dims: ModelDims, rank: int) -> AdapterVersion:
    base = base_shape(dims)
    ranks = {m.name: rank for m in base.modules if m.name.rpartition(".")[2] in ATTENTION_TARGETS}
    layout = lay_out(ranks, base)
    weights = rank * dims.adapter_elements() * dims.element_bytes
    return AdapterVersion(
        key=AdapterKey(f"{dims.name}/{rank}"),
        source="",
        rank=rank,
        num_modules=len(ranks),
        target_modules=ATTENTION_TARGETS,
        num_pages=layout.num_pages,
        weight_bytes=weights,
        host_bytes=layout.num_pages * base.page.num_bytes,
        disk_bytes=weights,
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-30b", 32_528_943_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
    ],
)
def test_parameters_are_those_of_the_model_card(name: str, parameters: int) -> None:
    assert find_dims(name).num_parameters == parameters
    assert find_dims(name).weight_bytes == 2 * parameters


def test_a_token_meets_all_weights_but_the_embedding() -> None:
    dense, mixture = find_dims("llama-7b"), find_dims("mixtral-8x7b")
    assert dense.active_weights + dense.head_weights == pytest.approx(6.607e9, rel=1e-3)  # all but the embedding
    assert mixture.active_weights + mixture.head_weights == pytest.approx(12.75e9, rel=1e-2)  # "13B active"


def adapter_bytes(base: BaseShape, rank: int, targets: tuple[str, ...]) -> int:
    modules = [module.name for module in base.modules if module.name.rpartition(".")[2] in targets]
    return lay_out(dict.fromkeys(modules, rank), base).weight_bytes


def test_adapters_have_the_published_sizes() -> None:
    assert adapter_bytes(base_shape("llama-7b"), 32, ATTENTION_TARGETS) == 64 * MIB
    assert adapter_bytes(base_shape("llama-2-70b"), 32, ATTENTION_TARGETS) == pytest.approx(256e6, rel=0.03)
    for dims in MODELS.values():
        assert 32 * dims.adapter_elements() * 2 == adapter_bytes(base_shape(dims), 32, ATTENTION_TARGETS)


def test_quantised_layers_take_fewer_bytes_and_as_many_operations() -> None:
    whole = find_dims("llama-3-70b")
    quarter = replace(whole, weight_bits=4)
    assert quarter.weight_bytes == pytest.approx(38.4e9, rel=0.01)
    assert quarter.active_weights == whole.active_weights


def test_kv_in_8_bits_takes_half_the_pages_and_adapters_the_same_bytes() -> None:
    half = find_dims("llama-3-8b")
    narrow = replace(half, kv_dtype="int8")
    assert narrow.kv_bytes_per_token == 2 * 32 * 8 * (128 + 4)
    assert base_shape(narrow).page.num_bytes == 16 * narrow.kv_bytes_per_token
    assert adapter_bytes(base_shape(narrow), 32, ATTENTION_TARGETS) == adapter_bytes(
        base_shape(half), 32, ATTENTION_TARGETS
    )
    with pytest.raises(ConfigError, match="kv_dtype = 'int4', expected one of int8, float32"):
        replace(half, kv_dtype="int4")


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4}, 4),
        ({"quant_method": "awq", "w_bit": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
    ],
)
def test_a_config_file_says_how_wide_weights_are(quantisation: object, bits: int | None) -> None:
    assert dims_from_config(QWEN_2_5_7B | {"quantization_config": quantisation}).weight_bits == bits


def test_experts_of_a_quantised_mixture_take_16_bits() -> None:
    config = QWEN_2_5_7B | {"num_local_experts": 8, "num_experts_per_tok": 2}
    assert dims_from_config(config | {"quantization_config": {"quant_method": "mxfp4"}}) == dims_from_config(config)


def test_a_base_in_single_precision_is_twice_as_large() -> None:
    half = find_dims("llama-3-8b")
    single = replace(half, dtype="float32")
    assert single.weight_bytes == 2 * half.weight_bytes
    assert single.kv_bytes_per_token == 2 * half.kv_bytes_per_token


def test_dimensions_come_from_a_config_file() -> None:
    assert dims_from_config(QWEN_2_5_7B, name="qwen2.5-7b") == find_dims("qwen2.5-7b")
    assert dims_from_config({"text_config": QWEN_2_5_7B}, name="qwen2.5-7b") == find_dims("qwen2.5-7b")
    mixture = QWEN_2_5_7B | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert dims_from_config(mixture).num_experts == 128
    assert dims_from_config(mixture).intermediate_size == 768
    with pytest.raises(ConfigError, match="no number vocab_size"):
        dims_from_config({key: value for key, value in QWEN_2_5_7B.items() if key != "vocab_size"})


DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}


GEMMA_2B = {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8}
GEMMA_2B |= {"num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256_000}
STARCODER_3B = {"model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24}
STARCODER_3B |= {"num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152}
QWEN_MOE = {"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
QWEN_MOE |= {"num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60}
QWEN_MOE |= {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "vocab_size": 151_936}


@pytest.mark.parametrize(
    ("fields", "parameters", "active"),  # as published; those active in a token without the embedding
    [
        (GEMMA_2B, 2.506e9, 2.506e9),  # its config.json does not say that the head is the embedding
        (STARCODER_3B, 3.03e9, 3.03e9),  # nor does this; the MLP has no gate
        (QWEN_MOE, 14.3e9, 2.7e9 - 2048 * 151_936),  # Qwen 1.5 MoE A2.7B: its shared expert is as wide as four
        ({"text_config": GEMMA_2B, "tie_word_embeddings": False}, 3.03e9, 2.506e9),
    ],
)
def test_what_a_config_file_leaves_to_the_kind_of_model(
    fields: dict[str, object], parameters: float, active: float
) -> None:
    dims = dims_from_config(fields)
    assert dims.num_parameters == pytest.approx(parameters, rel=0.005)
    assert dims.active_weights + dims.head_weights == pytest.approx(active, rel=0.01)


def test_a_model_without_gate_has_no_adapter_on_it() -> None:
    dims = dims_from_config(STARCODER_3B)
    assert dims.adapter_elements(("up_proj", "down_proj")) == 30 * 2 * (3072 + 12288)
    assert not any("gate" in module.name for module in base_shape(dims).modules)
    targets = adapter_targets(dims, ("up_proj", "down_proj"))
    assert targets.row_bytes == 30 * 2 * (3072 + 2 * 12288 + 12288 + 2 * 3072)
    with pytest.raises(ConfigError, match="Got target = 'gate_proj', expected one of"):
        dims.adapter_elements(("gate_proj",))


def test_latent_attention_has_values_of_another_size() -> None:
    lite = dims_from_config(DEEPSEEK_V2_LITE)
    assert lite.num_parameters == 15_706_484_224
    assert lite.kv_bytes_per_token == 27 * 16 * (192 + 128) * 2
    assert lite.active_weights + lite.head_weights == pytest.approx(2.4e9, rel=0.05)  # "2.4B activated"
    larger = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536}
    larger |= {"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "vocab_size": 129280}
    larger |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3}
    v3 = dims_from_config(DEEPSEEK_V2_LITE | larger)
    assert v3.num_parameters == pytest.approx(671e9, rel=1e-3)
    assert v3.active_weights + v3.head_weights == pytest.approx(37e9, rel=0.02)
    base = base_shape(v3)
    assert base.page.num_bytes == 16 * v3.kv_bytes_per_token
    assert {name.rpartition(".")[2] for name in base.all_linear} == set(v3.attention_modules)
    assert RooflineCost(v3, "h200", tensor_parallel_size=8).targets == tuple(v3.attention_modules)
    with pytest.raises(ConfigError, match="expected one of q_a_proj"):
        RooflineCost(v3, "h200", tensor_parallel_size=8, targets=("q_proj", "k_proj"))


def test_shapes_follow_from_dimensions() -> None:
    assert base_shape("llama-3-8b").page.num_bytes == 2 << 20
    assert base_shape("llama-2-7b").page.num_bytes == 8 << 20
    assert base_shape("llama-2-7b", block_size=8).page.num_bytes == 4 << 20
    mixture = base_shape("mixtral-8x7b")
    assert {name.rpartition(".")[2] for name in mixture.all_linear} == set(ATTENTION_TARGETS)
    by_name = {module.name: module for module in mixture.modules}
    down = by_name["model.layers.31.mlp.experts.down_proj"]
    assert (down.in_features, down.out_features, down.num_experts) == (14336, 4096, 8)
    spec = AdapterSpec(name="x", rank=4, targets=("gate_up_proj", "down_proj"))
    (version,) = adapter_versions([spec], mixture).values()
    assert version.rank == 4
    elements = find_dims("mixtral-8x7b").adapter_elements(spec.targets)
    assert version.weight_bytes == 4 * 2 * elements == 4 * 2 * 32 * 8 * (4096 + 2 * 14336 + 14336 + 4096)
    # A token is routed to two of the eight.
    assert adapter_targets(find_dims("mixtral-8x7b"), spec.targets).weights == elements // 4
    with pytest.raises(ConfigError, match="gate_proj"):
        RooflineCost("mixtral-8x7b", "h100", tensor_parallel_size=2, targets=("gate_proj",))


def test_unknown_names_are_refused_with_what_is_known() -> None:
    for call in (
        lambda: find_dims("gpt-5"),
        lambda: find_hardware("abacus"),
        lambda: find_copy_path("pigeon", "ragged"),
        lambda: RooflineCost("llama-7b", "a40", lora_kernel="magic"),
        lambda: RooflineCost("llama-7b", "a40", tensor_parallel_size=3),
    ):
        with pytest.raises(ConfigError, match="expected"):
            call()


def test_a_profile_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\nlike = "h200"\nflops_share = 0.62\n')
    ours = find_hardware(str(path))
    assert (ours.name, ours.flops_share, ours.memory_bytes) == ("ours", 0.62, HARDWARE["h200"].memory_bytes)
    path.write_text('like = "h200"\nmemory_bytes = 48e9\n')
    assert find_hardware(str(path)).memory_bytes == 48_000_000_000
    path.write_text('like = "h200"\nmemory-bytes = 48e9\n')
    assert find_hardware(str(path)).memory_bytes == 48_000_000_000
    for text, complaint in (
        ('name = "x"', "no flops_per_s, which it needs"),
        ("colour = 3", "ours.toml.colour, which nothing reads"),
        ("name = ", "ours.toml: not TOML"),
        ('like = "h200"\nflops_share = 1.2', "flops_share = 1.2, expected a number in"),
        ('like = "h20"', "like = 'h20', expected one of a10"),
        ('like = "ours.toml"', "like = 'ours.toml', expected one of a10"),  # itself
        ('like = ["h200"]', "expected one of a10"),
        ('like = "h200"\nmemory_bytes = "much"', "memory_bytes = 'much', expected a whole number"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            find_hardware(str(path))
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        find_hardware(str(tmp_path / "missing.toml"))


def test_what_a_model_leaves_for_pages() -> None:
    dims, a40 = find_dims("llama-7b"), find_hardware("a40")
    left = memory_for_pool(dims, a40, utilization=1.0)
    assert 0.9 < left / (a40.memory_bytes - dims.weight_bytes) < 1
    assert memory_for_pool(dims, a40, 2) > 2 * memory_for_pool(dims, a40)  # the weights are kept once
    with pytest.raises(ConfigError, match=r"on 1 x a100-80 needs 139\.\d GB on each"):
        memory_for_pool("llama-2-70b", "a100-80")


def test_copies_cost_their_bytes_and_their_number() -> None:
    dims, a40 = find_dims("llama-7b"), find_hardware("a40")
    pages, s_lora = COPY_PATHS["pages"], COPY_PATHS["s-lora"]
    floor = version(dims, 32).weight_bytes / a40.link_bytes_per_s
    assert floor <= copy_time_s(version(dims, 32), pages, a40) < 1.1 * floor
    assert copy_time_s(version(dims, 32), s_lora, a40) > 2 * floor
    matrices = 2 * 4 * 32
    small, large = (copy_time_s(version(dims, rank), s_lora, a40) for rank in (8, 16))
    assert 2 * small - large == pytest.approx(matrices * s_lora.copy_s)


def test_cutting_an_adapter_over_devices_helps_only_when_it_was_cut_beforehand() -> None:
    dims, a100 = find_dims("llama-2-70b"), find_hardware("a100-80")
    adapter = version(dims, 32)
    pages, s_lora = (
        [copy_time_s(adapter, COPY_PATHS[name], a100, tp) for tp in (1, 2, 4, 8)] for name in ("pages", "s-lora")
    )
    assert pages == sorted(pages, reverse=True)
    assert s_lora == sorted(s_lora)


def test_hardware_is_checked() -> None:
    with pytest.raises(ConfigError, match="memory_bytes = 0"):
        Hardware(name="x", flops_per_s=1, memory_bytes_per_s=1, memory_bytes=0, link_bytes_per_s=1)
