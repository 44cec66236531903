"""What we make of a checkpoint against what PEFT itself makes of it."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from bad_adapters import tiny_base
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    VeraConfig,
    get_peft_model,
)
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from transformers import LlamaConfig, LlamaForCausalLM
from unpacked import unpack

from manylora.core.adapters.method import parse_settings
from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.errors import AdapterError

pytestmark = [
    # PEFT's own: what it calls in transformers, and what it tells whoever saves an adapted embedding.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]

BASE = tiny_base(num_layers=3)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear", "lora_alpha": 3},
    "rslora": {"target_modules": ["o_proj", "up_proj"], "use_rslora": True},
    "rank-pattern": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.[12]\.self_attn\.k_proj": 7, "model.layers.0.mlp.down_proj": 1},
    },
    "alpha-pattern": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "alpha_pattern": {r"^model.*q_proj": 99, r".*\.mlp\..*": 77, "down_proj": 55, r"layers.1.*": 33},
        "rank_pattern": {"k_proj": 9},
        "use_rslora": True,
    },
    "first-pattern-wins": {
        "target_modules": ["q_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 3, "q_proj": 5},
        "alpha_pattern": {"q_proj": 5, "layers.1.self_attn.q_proj": 3},
    },
    "layers": {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [0, 2]},
    "one-layer": {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "exact-name-beats-layers": {
        "target_modules": ["q_proj", "model.layers.0.mlp.down_proj"],
        "layers_to_transform": [2],
        "layers_pattern": ["blocks", "layers"],
    },
    "excluded": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.1.self_attn.k_proj", "o_proj"]},
    "excluded-by-regex": {"target_modules": "all-linear", "exclude_modules": r".*\.(mlp|1)\..*"},
    "regex": {"target_modules": r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj"},
    "regex-lookahead": {"target_modules": r"^(?!.*layers\.0).*(?:q_proj|up_proj).*"},
    "embedding-and-head": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "lora_alpha": 5},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "mica": {"target_modules": ["q_proj"], "init_lora_weights": "mica"},
}

SAVED_VARIANTS: dict[str, dict[str, Any]] = {
    "head-listed-and-saved": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    "linear-listed-and-saved": {"target_modules": "all-linear", "modules_to_save": ["layers.1.self_attn.v_proj"]},
}


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def tuned(request: pytest.FixtureRequest) -> PeftModel:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | (VARIANTS | SAVED_VARIANTS)[request.param]
    tuned = get_peft_model(tiny_llama(), LoraConfig(**settings))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return tuned


def read(directory: Path) -> PackedAdapter:
    return read_adapter("mine", directory, ReadRules(base=BASE, max_bytes=1 << 24))


@pytest.mark.parametrize("tuned", VARIANTS, indirect=True)
def test_every_module_gets_exactly_what_peft_adds(tuned: PeftModel, tmp_path: Path) -> None:
    tuned.save_pretrained(tmp_path / "a")
    # As PEFT loads it: it saves patterns sorted, so another one may be the first that matches than in training.
    loaded = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "a"))
    expected = {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default").detach().numpy()
        for name, layer in loaded.named_modules()
        if isinstance(layer, LoraLayer)
    }
    packed = read(tmp_path / "a")
    ours = {part.module.name for group in packed.layout.groups.values() for part in group.modules}
    assert ours == set(expected) and ours
    for name, delta in expected.items():
        a, b = unpack(packed, name)
        # PEFT's delta has the shape of the base's weight, which for an embedding is [in, out].
        product = (b @ a).T if name == "model.embed_tokens" else b @ a
        np.testing.assert_allclose(product, delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tuned", ["head-listed-and-saved", "linear-listed-and-saved"], indirect=True)
def test_a_target_that_was_trained_whole_is_whole_as_in_peft(tuned: PeftModel, tmp_path: Path) -> None:
    """PEFT gives no pair to a module that ``target_modules`` and ``modules_to_save`` both name."""
    whole = {
        name.removeprefix("base_model.model.")
        for name, module in tuned.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    }
    pairs = {
        name.removeprefix("base_model.model.") for name, layer in tuned.named_modules() if isinstance(layer, LoraLayer)
    }
    tuned.save_pretrained(tmp_path / "a")
    packed = read(tmp_path / "a")
    ranks = {part.module.name: part.rank for group in packed.layout.groups.values() for part in group.modules}
    assert whole and pairs and ranks == dict.fromkeys(pairs, 4) | dict.fromkeys(whole, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tuned", ["alpha-pattern", "embedding-and-head"], indirect=True)
def test_both_formats_of_equal_weights_are_one_version(tuned: PeftModel, dtype: torch.dtype, tmp_path: Path) -> None:
    tuned.to(dtype)
    tuned.save_pretrained(tmp_path / "new")
    tuned.save_pretrained(tmp_path / "old", safe_serialization=False)
    assert (tmp_path / "old" / "adapter_model.bin").exists()
    new, old = read(tmp_path / "new"), read(tmp_path / "old")
    assert new.version.key == old.version.key
    np.testing.assert_array_equal(new.image, old.image)


SERVED: tuple[type[PeftConfig], ...] = (LoraConfig, AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, VeraConfig)


def written(make: type[PeftConfig], folder: Path, **settings: Any) -> dict[str, Any]:
    if make is AdaLoraConfig:
        settings["total_step"] = 10
    make(target_modules=["q_proj"], **settings).save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config


@pytest.mark.parametrize("make", SERVED, ids=lambda make: make.__name__)
def test_every_setting_of_peft_is_known(make: type[PeftConfig], tmp_path: Path) -> None:
    """A release of PEFT with a new setting turns this red: is it to be honoured, to be refused, or without effect?"""
    config = written(make, tmp_path)
    parse_settings("mine", config)
    for field in fields(make):
        try:
            parse_settings("mine", config | {field.name: "other"})
        except AdapterError as error:
            assert field.name in str(error) and "unknown setting" not in str(error)


def test_every_kind_of_peft_is_served_or_refused_by_its_name(tmp_path: Path) -> None:
    served = {written(make, tmp_path)["peft_type"] for make in SERVED}
    for kind in PeftType:
        if kind.value not in served:
            with pytest.raises(AdapterError, match=f"peft_type is '{kind.value}', expected one of {'|'.join(served)}"):
                parse_settings("mine", {"peft_type": kind.value})


KEEPS_THE_BASE = {"gaussian", "eva", "orthogonal", "mica"}


def test_every_initialisation_of_peft_is_known(tmp_path: Path) -> None:
    """PEFT's other names of initialisations change the base."""
    config = written(LoraConfig, tmp_path)
    hint = get_type_hints(LoraConfig)["init_lora_weights"]
    named = {value for one in get_args(hint) for value in get_args(one)}
    assert named > KEEPS_THE_BASE
    for name in named:
        if name in KEEPS_THE_BASE:
            parse_settings("mine", config | {"init_lora_weights": name})
        else:
            with pytest.raises(AdapterError, match="path_initial_model_for_weight_conversion"):
                parse_settings("mine", config | {"init_lora_weights": name})
