"""Mixtures of experts: merged as transformers merges them, of numbers and of codes, one weight at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_cases import build, change_config, change_tensors, numbers_of
from families import refer, serve
from mixture_cases import MIXTURES, write_mixture
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedConfig

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import Codes
from manylora.execution.checkpoint.open import open_checkpoint
from manylora.execution.model.freeze import gather, load_weights
from manylora.execution.model.load import load_model

UP = "model.layers.1.mlp.experts.gate_up_proj"
CONFIGS = {name.partition(" ")[0]: mixture.config for name, mixture in MIXTURES.items()}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a writer of the mixtures, once each: the folder of codes, and that of numbers."""
    found: dict[str, tuple[Path, Path]] = {}

    def write(name: str) -> tuple[Path, Path]:
        if name not in found:
            found[name] = write_mixture(name, tmp_path_factory.mktemp("mixture"))
        return found[name]

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_those_that_transformers_merges(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    build(CONFIGS[name]()).to(dtype).save_pretrained(tmp_path, max_shard_size="50KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    checkpoint = open_checkpoint(str(tmp_path))
    assert set(checkpoint.names) == set(expected)
    assert "model.layers.1.mlp.experts.gate_up_proj" in checkpoint.names
    for parameter in checkpoint.names:
        assert numbers_of(checkpoint, parameter).float().equal(expected[parameter].float()), parameter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_all_weights_of_a_device_are_those_of_transformers(tmp_path: Path, name: str, dtype: str) -> None:
    """Numbers of routers stay in float32 beside 16 bits, where transformers keeps them so."""
    model = build(CONFIGS[name]())
    for parameter, tensor in model.state_dict().items():
        if "bias" in parameter:
            torch.nn.init.normal_(tensor)
    model.save_pretrained(tmp_path)
    kept = getattr(torch, dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=kept).state_dict()
    loaded = load_model(ModelConfig(model=str(tmp_path), device="cpu", dtype=dtype))
    gather(loaded, torch.device("cpu"))
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    for parameter, tensor in expected.items():
        assert found[parameter].dtype is tensor.dtype, parameter
        assert found[parameter].equal(tensor), parameter


@pytest.mark.parametrize("name", MIXTURES)
def test_codes_of_experts_are_widened(bases: Callable[[str], tuple[Path, Path]], name: str) -> None:
    coded, plain = bases(name)
    checkpoint, expected = open_checkpoint(str(coded)), open_checkpoint(str(plain))
    assert set(checkpoint.names) == set(expected.names)
    kept = {parameter for parameter in checkpoint.names if isinstance(checkpoint.linear(parameter), Codes)}
    assert checkpoint.is_quantised == bool(kept) == ("mxfp4" not in name)
    assert not any(".experts." in parameter for parameter in kept)
    for parameter in checkpoint.names:
        torch.testing.assert_close(
            numbers_of(checkpoint, parameter),
            numbers_of(expected, parameter),
            rtol=0 if "mxfp4" in name else 1e-6,
            atol=1e-9,
        )


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_those_of_transformers(bases: Callable[[str], tuple[Path, Path]], name: str) -> None:
    coded, plain = bases(name)
    expected = refer(AutoModelForCausalLM, str(plain))
    assert 0.5 < float(expected.std()) < 2.0
    torch.testing.assert_close(serve(str(coded), "float32"), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_is_widened_as_transformers_does(bases: Callable[[str], tuple[Path, Path]], dtype: torch.dtype) -> None:
    coded, _ = bases("gpt_oss mxfp4")
    loaded = AutoModelForCausalLM.from_pretrained(
        coded, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()

    def make(config: PreTrainedConfig) -> torch.nn.Module:
        with torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model

    checkpoint = open_checkpoint(str(coded), build=make)
    assert checkpoint.format == "mxfp4"
    names = [name for name in checkpoint.names if "experts" in name and not name.endswith("bias")]
    assert len(names) == 4
    for name in names:
        weight = numbers_of(checkpoint, name)
        assert weight.dtype is dtype
        assert weight.equal(loaded[name])


def test_numbers_beside_the_configuration_of_mxfp4_are_read(
    bases: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """A copy in 16 bits whose configuration was left as it was."""
    coded, plain = bases("gpt_oss mxfp4")
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    shutil.copy(coded / "config.json", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert numbers_of(checkpoint, UP).equal(numbers_of(open_checkpoint(str(plain)), UP))


def replace(old: str, change: Callable[[Tensor], Tensor | None], new: str = "") -> Callable[[dict[str, Tensor]], None]:
    """Return damage: a tensor changed, under another name if one is given; ``None`` takes it out."""

    def damage(tensors: dict[str, Tensor]) -> None:
        tensor = change(tensors[old].clone() if new else tensors.pop(old))
        if tensor is not None:
            tensors[new or old] = tensor

    return damage


BLOCKS, SCALES = f"{UP}_blocks", f"{UP}_scales"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
HOSTILE: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "no scales": (
        "gpt_oss mxfp4",
        replace(SCALES, lambda _: None),
        r"1 x '.*blocks', 0 x '.*scales' for '.*1.mlp.experts.gate_up_proj', .*gate_up_proj_scales is missing",
    ),
    "no blocks": (
        "gpt_oss mxfp4",
        replace(BLOCKS, lambda _: None),
        r"0 x '.*blocks', 1 x '.*scales' for .* is missing",
    ),
    "neither": (
        "gpt_oss mxfp4",
        lambda tensors: [tensors.pop(name) for name in (BLOCKS, SCALES)] and None,
        f"lacks tensor '{UP}'",
    ),
    "numbers as well": (
        "gpt_oss mxfp4",
        replace(BLOCKS, lambda _: torch.zeros(3, 64, 192), UP),
        f"'{UP}', which another tensor is as well",
    ),
    "groups of 16": (
        "gpt_oss mxfp4",
        replace(BLOCKS, lambda tensor: tensor.reshape(3, 192, 4, 8)),
        r"blocks of shape \[3, 192, 4, 8\] and scales of shape \[3, 192, 2\], expected \[experts, outputs, gr",
    ),
    "fewer scales": (
        "gpt_oss mxfp4",
        replace(SCALES, lambda tensor: tensor[:, :, :1]),
        r"blocks of shape \[3, 192, 2, 16\] and scales of shape \[3, 192, 1\], expected",
    ),
    "fewer experts": (
        "gpt_oss mxfp4",
        lambda tensors: tensors.update({name: tensors[name][:2] for name in (BLOCKS, SCALES)}),
        rf"'{UP}' of shape \[2, 64, 192\], expected \[3, 64, 192\] by config.json",
    ),
    "scales as numbers": ("gpt_oss mxfp4", replace(SCALES, torch.Tensor.float), "scales of another type than U8"),
    "a scale beyond all": (
        "gpt_oss mxfp4",
        replace(SCALES, lambda tensor: tensor.fill_(255)),
        f"tensor '{UP}' with NaN in it",
    ),
    "a layer more": (
        "gpt_oss mxfp4",
        replace(BLOCKS, lambda tensor: tensor, BLOCKS.replace("layers.1", "layers.7")),
        r"has tensor 'model.layers.7.mlp.experts.gate_up_proj_blocks', which no part of GptOssForCausalLM takes",
    ),
    "an expert less": (
        "qwen3_moe fp8",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{EXPERT}.")] and None,
        r"4 x '.*gate_proj.weight', 3 x '.*up_proj.weight' for 'model.layers.1.mlp.experts.gate_up_proj', which do not",
    ),
    "an expert more": (
        "qwen3_moe fp8",
        lambda tensors: tensors.update(
            {
                name.replace("experts.2.", "experts.4."): tensor.clone()
                for name, tensor in tensors.items()
                if "1.mlp.experts.2." in name
            }
        ),
        r"'model.layers.1.mlp.experts.\w*' of shape \[5, \d+, \d+\], expected \[4, \d+, \d+\] by config.json",
    ),
    "no scale": (
        "qwen3_moe fp8",
        replace(f"{EXPERT}.weight_scale_inv", lambda _: None),
        rf"'{EXPERT}.weight' of type F8_E4M3, expected one of F64, F32, F16, BF16",
    ),
    "a scale of another shape": (
        "qwen3_moe fp8",
        replace(f"{EXPERT}.weight_scale_inv", lambda tensor: tensor[:1]),
        rf"'{EXPERT}.weight_scale_inv' of shape \[1, 2\], expected a number for each block",
    ),
    "codes of another shape": (
        "qwen3_moe fp8",
        replace(f"{EXPERT}.weight", lambda tensor: tensor.T.contiguous()),
        rf"'{EXPERT}.weight' of shape \[64, 48\], expected \[48, 64\]",
    ),
    "a code that is no number": (
        "qwen3_moe fp8",
        replace(f"{EXPERT}.weight", lambda tensor: tensor.view(torch.uint8).fill_(127).view(torch.float8_e4m3fn)),
        rf"'{EXPERT}.weight_scale_inv' of a weight with the code 0x7f at",
    ),
    "words of another shape": (
        "qwen3_moe gptq",
        replace(f"{EXPERT}.qweight", lambda tensor: tensor[:4]),
        rf"'{EXPERT}.qweight' of shape \[4, 48\], expected \[8, 48\]",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_ones_are_refused(bases: Callable[[str], tuple[Path, Path]], tmp_path: Path, case: str) -> None:
    name, damage, message = HOSTILE[case]
    folder = tmp_path / "base"
    shutil.copytree(bases(name)[0], folder)
    change_tensors(folder, damage)
    with pytest.raises(ConfigError, match=message) as raised:
        load_weights(ModelConfig(model=str(folder), device="cpu"))
    assert str(raised.value).startswith(f"Got model = {str(folder)!r}")


def test_experts_that_the_configuration_does_not_announce(
    bases: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    coded, _ = bases("qwen3_moe fp8")
    shutil.copytree(coded, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, lambda found: found["modules_to_not_convert"].append("mlp.experts.2.up_proj"))
    with pytest.raises(ConfigError, match=r"experts.2.up_proj.weight_scale_inv' of codes, where .* announces numbers"):
        open_checkpoint(str(tmp_path))
