"""Checkpoints without codes: views of mapped files by transformers' names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_cases import FILE, build, check_weights, file_of, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from manylora.core.errors import ConfigError
from manylora.demo import demo_model_path
from manylora.execution.checkpoint.open import open_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_numbers_are_views_of_their_files(tmp_path: Path, dtype: torch.dtype, size: str) -> None:
    model = build(tiny()).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert check_weights(tmp_path, model.state_dict()) == {}
    checkpoint = open_checkpoint(str(tmp_path))
    weight = checkpoint.linear(UP)
    assert isinstance(weight, torch.Tensor)
    assert checkpoint.format == str(dtype).removeprefix("torch.")
    assert weight.dtype is dtype
    assert file_of(weight) in {path.name for path in tmp_path.glob("*.safetensors")}
    assert file_of(weight.clone()) is None
    checkpoint.weights.close()
    assert weight.equal(model.get_parameter(UP))


def test_the_configuration_is_that_of_transformers() -> None:
    checkpoint = open_checkpoint(str(demo_model_path()))
    assert checkpoint.config.model_type == "llama"
    assert not hasattr(checkpoint.config, "quantization_config")
    assert next(iter(checkpoint.names)) == "model.embed_tokens.weight"
    with pytest.raises(ConfigError, match=r"its files lack 'model\.layers\.9\.x'"):
        checkpoint.linear("model.layers.9.x")


def test_tied_weights_are_held_once(tmp_path: Path) -> None:
    model = build(tiny(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    check_weights(tmp_path, {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"})


def test_tied_weights_of_other_numbers_are_refused(tmp_path: Path) -> None:
    """Transformers does not tie them, so that one of the two would be lost. Equal ones may be held twice."""
    model = build(tiny(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    check_weights(tmp_path, model.state_dict())
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.lm_head.weight.equal(loaded.model.embed_tokens.weight)
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' of other numbers than 'model\.embed_tokens\.weight'"):
        open_checkpoint(str(tmp_path))


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    model = build(tiny(tie_word_embeddings=True))
    AutoModel.from_config(tiny(tie_word_embeddings=True)).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert set(checkpoint.names) == model.state_dict().keys() - {"lm_head.weight"}


def test_more_layers_than_the_files_can_hold(tmp_path: Path) -> None:
    """Nothing is built for them."""
    build(tiny()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match="of 1000000000 layers by its configuration, and its files hold 21 tensors"):
        open_checkpoint(str(tmp_path))


def test_places_without_a_checkpoint(tmp_path: Path) -> None:
    for model, message in {
        str(tmp_path / "none"): "and there is no such folder",
        str(tmp_path / "none.gguf"): "and there is no such file",
        str(tmp_path): r"config\.json cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=message):
            open_checkpoint(model)
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="lacks weights in safetensors"):
        open_checkpoint(str(tmp_path))
    (tmp_path / FILE).write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or is no safetensors file"):
        open_checkpoint(str(tmp_path))
