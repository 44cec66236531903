"""AWQ and GPTQ, packed here number by number as their libraries lay them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import build, change_tensors, check_weights, linears, pack, tiny, write
from torch import Tensor

from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.open import open_checkpoint

GROUP = 8
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Stored:
    """Random codes of every linear, with the weights that they stand for."""

    def __init__(self, bits: int, group: int, *, zeros: bool, order: bool = False, dtype: Any = np.float16) -> None:
        self.model = build(tiny())
        self.rng = np.random.default_rng(1)
        self.bits, self.group, self.has_zeros, self.has_order, self.dtype = bits, group, zeros, order, dtype
        self.tensors: dict[str, Tensor] = dict(self.model.state_dict())
        self.expected: dict[str, Tensor] = dict(self.tensors)

    def draw(self, num_out: int, num_in: int) -> Any:
        group = num_in if self.group == -1 else self.group
        groups = -(-num_in // group)
        top = 1 << self.bits
        codes = self.rng.integers(0, top, (num_out, num_in))
        zeros = self.rng.integers(0, top, (num_out, groups)) if self.has_zeros else np.full((num_out, groups), top // 2)
        scales = self.rng.uniform(0.01, 0.1, (num_out, groups)).astype(self.dtype)
        index = np.arange(num_in) // group
        if self.has_order:
            index = self.rng.permutation(index)
        return codes, zeros, scales, index

    def store(self, name: str, codes: Any, zeros: Any, scales: Any, index: Any, parts: dict[str, Tensor]) -> None:
        weight = scales.astype(np.float32)[:, index] * (codes - zeros[:, index]).astype(np.float32)
        self.expected[f"{name}.weight"] = torch.from_numpy(weight)
        del self.tensors[f"{name}.weight"]
        self.tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in parts.items()}

    def awq(self, folder: Path, **fields: Any) -> Path:
        for name, linear in linears(self.model).items():
            codes, zeros, scales, index = self.draw(linear.out_features, linear.in_features)
            parts = {
                "qweight": pack(codes.T, 4, AWQ_ORDER),
                "qzeros": pack(zeros.T, 4, AWQ_ORDER),
                "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
            }
            self.store(name, codes, zeros, scales, index, parts)
        config = {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        return write(folder, tiny(), self.tensors, config | fields)

    def gptq(self, folder: Path, less: int = 1, **fields: Any) -> Path:
        for name, linear in linears(self.model).items():
            codes, zeros, scales, index = self.draw(linear.out_features, linear.in_features)
            ones = sum(1 << (self.bits * place) for place in range(32 // self.bits)) * less
            packed = pack(zeros.T, self.bits).numpy().view(np.uint32).astype(np.int64)
            parts = {
                "qweight": pack(codes, self.bits).T,  # 8 or 4 inputs a word
                "qzeros": torch.from_numpy((packed - ones).astype(np.uint32).view(np.int32)),
                "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
                "g_idx": torch.from_numpy(index.astype(np.int32)),
            }
            self.store(name, codes, zeros, scales, index, parts)
        config = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.has_order}
        return write(folder, tiny(), self.tensors, config | fields)


@pytest.mark.parametrize("group", [GROUP, -1])
def test_awq(tmp_path: Path, group: int) -> None:
    stored = Stored(4, group, zeros=True)
    codes = check_weights(stored.awq(tmp_path), stored.expected)
    assert codes.keys() == {f"{name}.weight" for name in linears(stored.model)}
    assert all(found.numbers == "int4" and found.shifts is not None and found.order is None for found in codes.values())
    assert all(found.scales.dtype is torch.float16 for found in codes.values())


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "order", "less", "fields"),
    [
        (4, GROUP, False, False, 1, {"sym": True}),
        (4, GROUP, True, True, 1, {"sym": False}),
        (4, GROUP, True, False, 0, {"checkpoint_format": "gptq_v2"}),
        (4, 24, True, True, 1, {}),
        (8, GROUP, True, True, 1, {"checkpoint_format": "gptq"}),
        (8, -1, False, False, 0, {"checkpoint_format": "gptq_v2"}),
    ],
)
def test_gptq(
    tmp_path: Path, bits: int, group: int, zeros: bool, order: bool, less: int, fields: dict[str, Any]
) -> None:
    """Groups of 24 do not divide 40 inputs: the last is smaller. A zero point of 0 borrows from its neighbour."""
    stored = Stored(bits, group, zeros=zeros, order=order)
    codes = check_weights(stored.gptq(tmp_path, less, **fields), stored.expected)
    assert {found.numbers for found in codes.values()} == {f"int{bits}"}
    assert all((found.shifts is not None) == zeros for found in codes.values())
    assert all((found.order is not None) == order for found in codes.values())


def test_gptq_of_listed_modules(tmp_path: Path) -> None:
    """Modules that the configuration does not list are numbers; scales of bfloat16 stay so."""
    stored = Stored(4, GROUP, zeros=False, dtype=np.float32)
    names = ["self_attn.k_proj", "mlp.down_proj"]
    folder = stored.gptq(tmp_path, modules_in_block_to_quantize=[names[:1], names[1:]])
    original = stored.model.state_dict()
    kept = {name: weight for name, weight in original.items() if not name.endswith(tuple(f"{n}.weight" for n in names))}
    tensors = {
        name: tensor for name, tensor in stored.tensors.items() if f"{name.rpartition('.')[0]}.weight" not in kept
    }
    tensors |= kept
    write(
        folder,
        tiny(),
        tensors,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "modules_in_block_to_quantize": [names]},
    )
    codes = check_weights(folder, stored.expected | kept)
    assert len(codes) == 4
    assert {found.scales.dtype for found in codes.values()} == {torch.float32}


def test_biases_that_the_model_lacks(tmp_path: Path) -> None:
    """AutoGPTQ stored some of zeros; others are an error."""
    stored = Stored(4, GROUP, zeros=False)
    folder = stored.gptq(tmp_path)
    bias = "model.layers.0.mlp.up_proj.bias"
    change_tensors(folder, lambda tensors: tensors.update({bias: torch.zeros(96).half()}))
    check_weights(folder, stored.expected)
    change_tensors(folder, lambda tensors: tensors.update({bias: torch.ones(96).half()}))
    with pytest.raises(ConfigError, match=f"has tensor '{bias}', which no part of LlamaForCausalLM takes"):
        open_checkpoint(str(folder))
