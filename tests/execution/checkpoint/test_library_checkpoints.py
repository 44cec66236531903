"""bitsandbytes and torchao: written by transformers with the libraries, compared with what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from checkpoint_cases import build, check_weights, linears, tiny
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from manylora.execution.checkpoint.codes import Codes


def requantise(folder: Path, config: Any, dtype: torch.dtype, **sizes: Any) -> Any:
    """Let transformers quantise a model and save it; return the quantised model."""
    build(tiny(**sizes)).to(dtype).save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config, dtype=dtype)
    model.save_pretrained(folder)
    return model


BITSANDBYTES: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "storage": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
}


def numbers_of(weight: Any) -> Tensor:
    """Return a weight as bitsandbytes computes it, in float32.

    Its kernel for CPUs takes blocks to end with rows; as one row, they run on as on other devices.
    """
    if weight.dtype is torch.int8:
        numbers: Tensor = bitsandbytes.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        return numbers
    state = weight.quant_state
    shape, state.shape, state.dtype = state.shape, torch.Size([1, state.shape.numel()]), torch.float32
    return bitsandbytes.functional.dequantize_4bit(weight.data, state).reshape(shape)


@pytest.mark.parametrize("case", BITSANDBYTES)
def test_bitsandbytes(tmp_path: Path, case: str) -> None:
    """Blocks of 64 codes do not end with rows of 72, 96 or 40."""
    model = requantise(tmp_path, BitsAndBytesConfig(**BITSANDBYTES[case]), torch.float32)
    expected = {name: tensor for name, tensor in model.named_parameters() if "_proj" not in name}
    expected |= {f"{name}.weight": numbers_of(part.weight) for name, part in linears(model).items()}
    codes = check_weights(tmp_path, expected, relative=2e-6, absolute=1e-8)
    assert len(codes) == 14
    assert {found.numbers for found in codes.values()} == {"int8" if case == "int8" else "table4"}


TORCHAO = {
    "int8-outputs": ("int8", None),
    "int8-groups": ("int8", 8),
    "int8-activations": ("int8", None),
    "int4-groups": ("int4", 8),
    "float8-outputs": ("float8_e4m3fn", None),
}


@pytest.mark.parametrize("case", TORCHAO)
def test_torchao(case: str) -> None:
    """Folders that transformers 5.24 saved with torchao 0.18, and what its tensors' ``dequantize`` returned.

    They are kept beside this test, since every import of transformers imports torchao where it is installed.
    """
    numbers, group = TORCHAO[case]
    folder = Path(__file__).with_name("torchao") / case
    expected = load_file(folder / "expected.safetensors")
    codes = check_weights(folder, expected, relative=1 / 256, absolute=1e-6)
    assert len(codes) == 7
    for found in codes.values():
        assert isinstance(found, Codes)
        assert found.numbers == numbers
        assert found.group == (found.codes.shape[1] if group is None else group)
