"""GGUF files: written by the gguf library, and compared with what it, and transformers, read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_cases import SIZES, build, check_weights, file_of, numbers_of
from gguf import GGMLQuantizationType as Kind
from gguf_cases import NORMS_PLUS_ONE, write_gguf
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.gguf import GgufFile
from manylora.execution.checkpoint.open import open_checkpoint
from manylora.execution.model.load import load_skeleton

WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 4}
EVEN = {name: size for name, size in SIZES.items() if name != "head_dim"} | {
    "hidden_size": 64,
    "num_attention_heads": 4,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES | {"num_attention_heads": 4}, rope_theta=5e5, rms_norm_eps=1e-5),
    "qwen2": Qwen2Config(**EVEN, rope_theta=1e6),
    "qwen3": Qwen3Config(**SIZES, rope_theta=1e6),
    "gemma2": Gemma2Config(**SIZES, sliding_window=48, attn_logit_softcapping=40.0, final_logit_softcapping=20.0),
    "gemma3": Gemma3TextConfig(**SIZES | {"num_hidden_layers": 6}, sliding_window=48),
    "phi3": Phi3Config(**EVEN, sliding_window=47, pad_token_id=0, eos_token_id=1),
    "starcoder2": Starcoder2Config(**EVEN, sliding_window=None, bos_token_id=0, eos_token_id=0),
    "stablelm": StableLmConfig(**EVEN),
    "nemotron": NemotronConfig(**EVEN),
}
SAME = ("rope_parameters", "head_dim", "sliding_window", "layer_types", "rms_norm_eps", "norm_eps", "layer_norm_eps")
SAME += ("attn_logit_softcapping", "final_logit_softcapping", "tie_word_embeddings", "use_parallel_residual")


def leaves(fields: Any, path: str = "") -> dict[str, Any]:
    """Return the values inside of objects and lists, by their paths."""
    if isinstance(fields, dict | list):
        inner = fields.items() if isinstance(fields, dict) else enumerate(fields)
        return {name: leaf for key, part in inner for name, leaf in leaves(part, f"{path}.{key}").items()}
    return {path: fields}


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    return leaves({name: config.to_dict().get(name) for name in SAME})


@pytest.mark.parametrize("architecture", CONFIGS)
def test_each_architecture(tmp_path: Path, architecture: str) -> None:
    """Weights and configuration are the original's, with weights and without, and those that transformers loads."""
    model, path = build(CONFIGS[architecture]), tmp_path / "model.gguf"
    write_gguf(path, model, architecture)
    tied: Any = model.all_tied_weights_keys
    original = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    check_weights(path, original, absolute=1e-6 if architecture in NORMS_PLUS_ONE else 0.0)
    for config in (open_checkpoint(str(path)).config, load_skeleton(ModelConfig(model=str(path))).text_config):
        assert settings_of(config) == pytest.approx(settings_of(CONFIGS[architecture]))
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, config=model.config, dtype=torch.float32
    )
    check_weights(path, {name: tensor for name, tensor in loaded.state_dict().items() if name not in tied})


def halves_of_rows(kind: Kind) -> Any:
    """Return a choice of that kind for weights of whole blocks."""
    size = gguf.GGML_QUANT_SIZES[kind][0]
    return lambda name, shape: kind if len(shape) == 2 and shape[1] % size == 0 else Kind.F32


@pytest.mark.parametrize(
    ("kind", "numbers", "group", "has_shifts", "dtype"),
    [
        (Kind.Q8_0, "int8", 32, False, torch.float16),
        (Kind.Q4_0, "int4", 32, False, torch.float16),
        (Kind.Q4_K, "int4", 32, True, torch.float32),
        (Kind.Q5_K, "int8", 32, True, torch.float32),
        (Kind.Q6_K, "int8", 16, False, torch.float32),
    ],
)
def test_each_kind_of_blocks(
    tmp_path: Path, kind: Kind, numbers: str, group: int, has_shifts: bool, dtype: torch.dtype
) -> None:
    """Rows of queries and keys that llama.cpp reordered are put back."""
    read = write_gguf(tmp_path / "model.gguf", build(LlamaConfig(**WIDE)), "llama", halves_of_rows(kind))
    expected = {name: torch.from_numpy(numbers) for name, numbers in read.items()}
    # Shifts are rounded once where the library adds products.
    exact = {"relative": 1e-6, "absolute": 1e-4} if kind is Kind.Q4_K else {}
    codes = check_weights(tmp_path / "model.gguf", expected, **exact)
    assert len(codes) > 10
    for found in codes.values():
        assert (found.numbers, found.group, found.shifts is not None) == (numbers, group, has_shifts)
        assert found.scales.dtype is dtype
    assert open_checkpoint(str(tmp_path / "model.gguf")).format == f"gguf {kind.name}"


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_floats_are_views_of_the_file(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "model.gguf"
    read = write_gguf(path, build(CONFIGS["qwen3"]), "qwen3", halves_of_rows(kind))
    check_weights(path, {name: torch.from_numpy(numbers) for name, numbers in read.items()})
    checkpoint = open_checkpoint(str(path))
    weight = numbers_of(checkpoint, "model.layers.0.mlp.up_proj.weight")
    assert weight.dtype is (torch.float16 if kind is Kind.F16 else torch.bfloat16)
    assert file_of(weight) == path.name
    checkpoint.weights.close()
    assert weight.isfinite().all()


def llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_scaled_as_llama_3s(tmp_path: Path, factor: float) -> None:
    """llama.cpp stores what they are divided by."""
    config = LlamaConfig(**WIDE, rope_parameters=llama3(factor))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    path = tmp_path / "model.gguf"
    extra = {"rope_freqs.weight": (plain / scaled.double()).float().numpy()}
    write_gguf(path, build(config), "llama", extra=extra)
    assert leaves(open_checkpoint(str(path)).config.rope_parameters) == pytest.approx(leaves(llama3(factor)))
    write_gguf(path, build(config), "llama", extra={"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)})
    with pytest.raises(ConfigError, match=r"model\.gguf has tensor 'rope_freqs\.weight' of frequencies that are not"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("architecture", "fields", "wanted"),
    [
        ("qwen2", {"rope.scaling.type": "none"}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            "qwen2",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        ),
        (
            "qwen2",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32768,
                "rope.scaling.yarn_beta_fast": 24.0,
            },
            {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 24.0,
            },
        ),
        (
            "gemma3",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 20000.0},
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            },
        ),
    ],
)
def test_scaled_positions(tmp_path: Path, architecture: str, fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, build(CONFIGS[architecture]), architecture, fields=fields)
    assert leaves(open_checkpoint(str(path)).config.rope_parameters) == leaves(wanted)


@pytest.mark.parametrize(
    ("architecture", "layers", "wanted"), [("gemma2", 2, 20), ("gemma2", 46, 36), ("gemma3", 6, 20), ("gemma3", 62, 36)]
)
def test_the_scale_of_scores_that_no_field_tells(tmp_path: Path, architecture: str, layers: int, wanted: int) -> None:
    """That of transformers by default is right for heads of 256 alone; the models of 27B have heads of 128."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = type(CONFIGS[architecture])(**SIZES | {"num_hidden_layers": layers})
    GgufFile.read("tiny", tmp_path / "model.gguf").settle(config)
    assert config.query_pre_attn_scalar == wanted


def test_llamas_by_the_name_of_mistral(tmp_path: Path) -> None:
    """transformers takes them for another class, with the same weights and a window that the file does not state."""
    model, path = build(CONFIGS["llama"]), tmp_path / "model.gguf"
    write_gguf(path, model, "llama", name="mistral")
    check_weights(path, model.state_dict())
    config = open_checkpoint(str(path)).config
    assert (config.model_type, config.sliding_window) == ("mistral", None)
