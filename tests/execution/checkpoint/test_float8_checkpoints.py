"""float8 as transformers stores it: compared with what transformers makes of the same files on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import FILE, build, check_weights, file_of, linears, tiny, write
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from manylora.execution.checkpoint.codes import Codes
from manylora.execution.checkpoint.open import open_checkpoint

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def store(
    folder: Path,
    fields: dict[str, Any],
    shape: Any,
    *,
    leaf: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    codes: torch.dtype = E4M3,
    block: list[int] | None = None,
) -> dict[str, Tensor]:
    """Write a checkpoint whose scales have ``shape(out, in)``; return its weights by transformers' formula."""
    model = build(tiny())
    tensors = dict(model.state_dict())
    expected = dict(tensors)
    for number, (name, linear) in enumerate(linears(model).items()):
        generator = torch.Generator().manual_seed(number)
        scale = (torch.rand(shape(*linear.weight.shape), generator=generator) * 0.1 + 0.01).to(dtype)
        weight = (torch.randn(linear.weight.shape, generator=generator) * 10).to(codes)
        tensors |= {f"{name}.weight": weight, f"{name}.{leaf}": scale}
        expected[f"{name}.weight"] = _dequantize_fp8_weight(weight, scale.float(), block, torch.float32)
    write(folder, tiny(), tensors, fields)
    return expected


def grid(block: list[int]) -> Any:
    return lambda rows, columns: (math.ceil(rows / block[0]), math.ceil(columns / block[1]))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"},
        {"shape": grid([8, 8]), "block": [8, 8]},
    ),
    "blocks that end early": (
        {"quant_method": "fp8", "weight_block_size": [32, 28], "modules_to_not_convert": ["lm_head"]},
        {"shape": grid([32, 28]), "block": [32, 28]},
    ),
    "blocks of 128 by default": (
        {"quant_method": "fp8"},
        {"shape": grid([128, 128]), "block": [128, 128], "dtype": torch.bfloat16},
    ),
    "scales of an exponent": (
        {"quant_method": "fp8", "weight_block_size": [8, 8], "scale_fmt": "ue8m0"},
        {"shape": grid([8, 8]), "block": [8, 8], "dtype": E8M0},
    ),
    "one for the weight": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        {"shape": lambda *_: ()},
    ),
    "one for the weight, as AutoFP8 stores it": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        {"shape": lambda *_: (1,), "leaf": "weight_scale"},
    ),
    "e5m2": ({"quant_method": "fp8", "weight_block_size": None}, {"shape": lambda *_: (), "codes": E5M2}),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        {"shape": lambda rows, _: (rows, 1), "leaf": "weight_scale"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_layout(tmp_path: Path, case: str) -> None:
    fields, options = CASES[case]
    codes = check_weights(tmp_path, store(tmp_path, fields, **options))
    kept = torch.float32 if options.get("dtype") in (None, E8M0) else options["dtype"]
    assert {found.numbers for found in codes.values()} == {"float8_e5m2" if case == "e5m2" else "float8_e4m3fn"}
    assert {found.scales.dtype for found in codes.values()} == {kept}
    if fields.get("weight_block_size"):
        assert {found.group for found in codes.values()} == {fields["weight_block_size"][1]}


def test_codes_are_views_of_the_file(tmp_path: Path) -> None:
    fields, options = CASES["blocks"]
    store(tmp_path, fields, **options)
    codes = open_checkpoint(str(tmp_path)).linear("model.layers.0.mlp.up_proj.weight")
    assert isinstance(codes, Codes)
    assert file_of(codes.codes) == FILE


def test_as_transformers_loads_it(tmp_path: Path) -> None:
    """Without a GPU transformers turns the codes into numbers itself."""
    fields, options = CASES["blocks"]
    store(tmp_path, fields, **options)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    check_weights(tmp_path, dict(loaded.state_dict()))
