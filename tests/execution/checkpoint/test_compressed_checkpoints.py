"""compressed-tensors: written and read back by the library, and by hand where it no longer writes what people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import build, change_config, change_tensors, check_weights, linears, tiny
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from torch import Tensor, nn

from manylora.execution.checkpoint.open import open_checkpoint

GROUP = 8
WEIGHTS: dict[str, dict[str, Any]] = {
    "w8a8": {"num_bits": 8, "strategy": "channel"},
    "w8-tensor": {"num_bits": 8, "strategy": "tensor"},
    "w8-zeros": {"num_bits": 8, "strategy": "group", "group_size": GROUP, "symmetric": False},
    "w4": {"num_bits": 4, "strategy": "group", "group_size": GROUP},
    "w4-zeros": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
    "w4-channel-zeros": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "w8-packed": {"num_bits": 8, "strategy": "group", "group_size": GROUP, "symmetric": False},
    "w4a8": {"num_bits": 4, "strategy": "channel"},
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    "fp8-naive": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": GROUP},
}
FORMATS = {
    **dict.fromkeys(["w8a8", "w8-tensor", "w8-zeros", "w4a8"], "int-quantized"),
    **dict.fromkeys(["w4", "w4-zeros", "w4-channel-zeros", "w8-packed"], "pack-quantized"),
    **dict.fromkeys(["fp8-tensor", "fp8-channel", "fp8-block"], "float-quantized"),
    "fp8-naive": "naive-quantized",
}


def calibrate(model: nn.Module) -> None:
    """Give every quantised linear scales that suit its weights, and zero points."""
    generator = torch.Generator().manual_seed(3)
    for part in linears(model).values():
        if hasattr(part, "weight_scale"):
            weights = part.quantization_scheme.weights
            top = 448.0 if weights.type == "float" else 2.0 ** (weights.num_bits - 1)
            shape = part.weight_scale.shape
            part.weight_scale.data = part.weight.abs().max() / top * (torch.rand(shape, generator=generator) + 0.5)
        if hasattr(part, "weight_zero_point"):
            shape = part.weight_zero_point.shape
            part.weight_zero_point.data = torch.randint(-7, 8, shape, generator=generator, dtype=torch.int8)


def save(folder: Path, groups: dict[str, Any], *, ignore: list[str], **sizes: Any) -> dict[str, Tensor]:
    """Write a checkpoint; return its weights as the library decompresses them, in float32."""
    model = build(tiny(**sizes))
    config = QuantizationConfig(config_groups=groups, ignore=ignore)
    apply_quantization_config(model, config, show_progress=False)
    calibrate(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    expected = dict(model.state_dict())
    for name, part in linears(model).items():
        if (scheme := getattr(part, "quantization_scheme", None)) is not None:
            parts = dict(part.named_parameters(recurse=False))
            for leaf in parts:
                del expected[f"{name}.{leaf}"]
            codec = BaseCompressor.get_value_from_registry(scheme.format)
            expected[f"{name}.weight"] = codec.decompress(parts, scheme)["weight"]
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return expected


def group(case: str, *targets: str) -> dict[str, Any]:
    return {"targets": list(targets or ("Linear",)), "weights": WEIGHTS[case], "format": FORMATS[case]}


@pytest.mark.parametrize("case", WEIGHTS)
def test_each_format_of_the_library(tmp_path: Path, case: str) -> None:
    expected = save(tmp_path, {"group_0": group(case)}, ignore=["lm_head"])
    codes = check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)
    assert len(codes) == 14
    kind = "float8_e4m3fn" if "fp8" in case else f"int{WEIGHTS[case]['num_bits']}"
    assert {found.numbers for found in codes.values()} == {kind}
    assert all((found.shifts is None) == WEIGHTS[case].get("symmetric", True) for found in codes.values())


def test_rows_that_end_inside_a_word(tmp_path: Path) -> None:
    expected = save(tmp_path, {"group_0": group("w4-channel-zeros")}, ignore=["lm_head"], hidden_size=74)
    check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)


def test_groups_of_modules(tmp_path: Path) -> None:
    """A name comes before an expression, which comes before a class; the list to ignore before all."""
    name = "model.layers.0.mlp.up_proj"
    groups = {
        "class": group("w8a8"),
        "expression": group("w4", r"re:.*\.up_proj$", r"re:.*\.q_proj$"),
        "name": group("fp8-channel", name),
    }
    expected = save(tmp_path, groups, ignore=["lm_head", r"re:model\.layers\.1\.self_attn.*"])
    codes = check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)
    assert len(codes) == 10
    assert codes[f"{name}.weight"].numbers == "float8_e4m3fn"
    assert codes["model.layers.1.mlp.up_proj.weight"].numbers == "int4"
    assert codes["model.layers.0.self_attn.q_proj.weight"].numbers == "int4"
    assert codes["model.layers.0.self_attn.k_proj.weight"].numbers == "int8"


def test_scales_keep_their_type(tmp_path: Path) -> None:
    expected = save(tmp_path, {"group_0": group("w4-zeros")}, ignore=["lm_head"])
    before = check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)

    def shorten(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: scale.bfloat16() for name, scale in tensors.items() if name.endswith("weight_scale")}

    change_tensors(tmp_path, shorten)
    checkpoint = open_checkpoint(str(tmp_path))
    for name, codes in before.items():
        found = checkpoint.linear(name)
        assert not isinstance(found, Tensor)
        assert found.scales.dtype is torch.bfloat16
        assert found.codes.equal(codes.codes)
        assert found.shifts is not None
        assert codes.shifts is not None
        exact = found.scales.float() * (codes.shifts / codes.scales).round()
        assert found.shifts.equal(exact)


@pytest.mark.parametrize("case", ["w4", "w8-zeros"])
def test_the_order_of_activations(tmp_path: Path, case: str) -> None:
    """Releases up to 0.19 stored the group of each input; -1 for none."""
    expected = save(tmp_path, {"group_0": group(case)}, ignore=["lm_head"])
    first = check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)
    generator = torch.Generator().manual_seed(5)

    def permute(tensors: dict[str, Tensor]) -> None:
        for name, codes in first.items():
            num_in = expected[name].shape[1]
            if "up_proj" in name:
                tensors[f"{name}_g_idx"] = torch.full((num_in,), -1, dtype=torch.int32)
                continue
            index = torch.randperm(num_in, generator=generator) // GROUP
            middle = 8 if case == "w4" else 128
            shift = 0.0 if codes.shifts is None else codes.shifts[:, index]
            expected[name] = codes.scales[:, index] * (codes.codes.float() - middle) + shift
            tensors[f"{name}_g_idx"] = index.int()

    change_tensors(tmp_path, permute)
    codes = check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)
    assert all((found.order is None) == ("up_proj" in name) for name, found in codes.items())


def test_zero_points_of_early_releases(tmp_path: Path) -> None:
    """They were not packed."""
    expected = save(tmp_path, {"group_0": group("w4-zeros")}, ignore=["lm_head"])
    points = {
        name: -(codes.shifts / codes.scales).round()
        for name, codes in check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7).items()
        if codes.shifts is not None
    }

    def unpack(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"{name}_zero_point": point.to(torch.int8) for name, point in points.items()}

    change_tensors(tmp_path, unpack)
    assert len(check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)) == len(points) == 14


def test_scales_of_activations_and_the_cache_are_left(tmp_path: Path) -> None:
    expected = save(tmp_path, {"group_0": group("fp8-tensor")}, ignore=["lm_head"])

    def add(tensors: dict[str, Tensor]) -> None:
        layer = "model.layers.0.self_attn"
        names = [f"{layer}.k_scale", f"{layer}.v_scale", f"{layer}.q_proj.input_scale", f"{layer}.k_proj.output_scale"]
        tensors |= {name: torch.ones(1) for name in names}

    change_tensors(tmp_path, add)
    change_config(tmp_path, lambda config: config.update(kv_cache_scheme={"num_bits": 8, "type": "float"}))
    check_weights(tmp_path, expected, relative=1e-6, absolute=1e-7)
