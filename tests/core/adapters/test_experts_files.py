"""Files with LoRA of experts and routers: what is read of them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_adapters import adapter_config, tiny_base
from numpy.typing import NDArray
from safetensors.numpy import save_file
from unpacked import unpack

from manylora.core.adapters.read import HeaderReader, ReadRules, read_adapter
from manylora.core.adapters.report import inspect_adapter
from manylora.core.adapters.shape import BaseShape, ModuleKind, TargetModule
from manylora.core.errors import AdapterError, WeightsMissing

NUM, HIDDEN, INNER, R, ALPHA = 3, 32, 20, 4, 8
MLP = "model.layers.0.mlp"
KEY = "base_model.model.model.layers.0.mlp"
FORMER = "base_model.model.model.layers.0.block_sparse_moe"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

Tensors = dict[str, NDArray[Any]]


def mixture() -> BaseShape:
    """The shape of a small Mixtral of one layer."""
    base = tiny_base(num_layers=1)
    own = [
        (f"{MLP}.gate", ModuleKind.ROUTER, HIDDEN, NUM, 1),
        (f"{MLP}.experts.gate_up_proj", ModuleKind.EXPERTS, HIDDEN, 2 * INNER, NUM),
        (f"{MLP}.experts.down_proj", ModuleKind.EXPERTS, INNER, HIDDEN, NUM),
    ]
    modules = [module for module in base.modules if ".mlp." not in module.name]
    for name, kind, inputs, outputs, num in own:
        modules.append(
            TargetModule(
                name=name,
                kind=kind,
                in_features=inputs,
                out_features=outputs,
                layer=0,
                group=name,
                offset=0,
                num_experts=num,
            )
        )
    return replace(base, modules=tuple(modules), unsupported=(("model.layers.1.mlp.experts", "of another form"),))


BASE = mixture()
RULES = ReadRules(base=BASE, max_bytes=1 << 24)


def pair(name: str, num_in: int, num_out: int, rank: int = R) -> Tensors:
    rng = np.random.default_rng([*name.encode()])
    return {
        f"{name}.lora_A.weight": rng.normal(size=(rank, num_in)).astype(np.float32),
        f"{name}.lora_B.weight": rng.normal(size=(num_out, rank)).astype(np.float32),
    }


def fused() -> Tensors:
    return pair(f"{KEY}.experts.base_layer", HIDDEN, 2 * INNER, NUM * R) | pair(
        f"{KEY}.experts", INNER, HIDDEN, NUM * R
    )


def single() -> Tensors:
    tensors = pair(f"{FORMER}.gate", HIDDEN, NUM)
    for expert in range(NUM):
        for linear, num_in, num_out in (("w1", HIDDEN, INNER), ("w3", HIDDEN, INNER), ("w2", INNER, HIDDEN)):
            tensors |= pair(f"{FORMER}.experts.{expert}.{linear}", num_in, num_out)
    return tensors


def write(folder: Path, tensors: Tensors, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = adapter_config() | {"r": R, "lora_alpha": ALPHA, "target_modules": []} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_each_expert_has_the_pair_that_peft_gives_it(tmp_path: Path) -> None:
    tensors = fused()
    packed = read_adapter("x", write(tmp_path, tensors, target_parameters=BOTH), RULES)
    for name, key in (("gate_up_proj", f"{KEY}.experts.base_layer"), ("down_proj", f"{KEY}.experts")):
        a, b = unpack(packed, f"{MLP}.experts.{name}")
        stacked = tensors[f"{key}.lora_B.weight"]
        for expert in range(NUM):
            own = slice(expert * R, (expert + 1) * R)
            np.testing.assert_array_equal(a[own], tensors[f"{key}.lora_A.weight"][own])
            # PEFT: ``reshape(out, -1, experts).permute(2, 0, 1)``.
            expected = stacked.reshape(len(stacked), -1, NUM)[:, :, expert]
            np.testing.assert_array_equal(b[:, own], expected * np.float32(ALPHA / R))
    assert packed.version.rank == R
    assert packed.version.target_modules == ("down_proj", "gate_up_proj")


def test_one_parameter_lies_at_the_front(tmp_path: Path) -> None:
    """Without another one around it, its tensors have the plain name."""
    tensors = pair(f"{KEY}.experts", HIDDEN, 2 * INNER, NUM * R)
    packed = read_adapter("x", write(tmp_path, tensors, target_parameters=BOTH[:1]), RULES)
    assert packed.version.target_modules == ("gate_up_proj",)


def test_a_base_may_have_the_name_that_mixtral_had(tmp_path: Path) -> None:
    """Granite MoE calls the module around its experts so today."""

    def moved(name: str) -> str:
        return name.replace(".mlp.", ".block_sparse_moe.")

    modules = tuple(replace(m, name=moved(m.name), group=moved(m.group)) for m in BASE.modules)
    tensors = {moved(key): tensor for key, tensor in fused().items()}
    tensors |= pair(f"{FORMER}.gate", HIDDEN, NUM)
    folder = write(tmp_path, tensors, target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"])
    rules = replace(RULES, base=replace(BASE, modules=modules))
    assert read_adapter("x", folder, rules).version.num_modules == 3


def test_linears_of_single_experts_become_one_pair(tmp_path: Path) -> None:
    tensors = single()
    packed = read_adapter("x", write(tmp_path, tensors, target_modules=["gate", "w1", "w2", "w3"]), RULES)
    a, b = unpack(packed, f"{MLP}.experts.gate_up_proj")
    for expert in range(NUM):
        own = slice(expert * 2 * R, (expert + 1) * 2 * R)
        expected = np.zeros((2 * INNER, HIDDEN))
        for row, linear in ((0, "w1"), (INNER, "w3")):
            key = f"{FORMER}.experts.{expert}.{linear}"
            delta = tensors[f"{key}.lora_B.weight"].astype(np.float64) @ tensors[f"{key}.lora_A.weight"]
            expected[row : row + INNER] = delta * ALPHA / R
        np.testing.assert_allclose(b[:, own].astype(np.float64) @ a[own], expected, rtol=1e-5, atol=1e-5)
    assert packed.version.target_modules == ("down_proj", "gate", "gate_up_proj")


def test_the_header_gives_the_size_that_the_weights_take(tmp_path: Path) -> None:
    """Of numbers in 16 bits too: to sort an expert's numbers rounds none."""
    tensors = {key: tensor.astype(np.float16) for key, tensor in fused().items()}
    folder = write(tmp_path, tensors, target_parameters=BOTH)
    rules = replace(RULES, dtype="auto")
    known, read = HeaderReader(rules).read("x", folder), read_adapter("x", folder, rules).version
    assert (known.dtype, known.num_pages, known.rank) == (read.dtype, read.num_pages, R)
    assert read.dtype == "float16"


def test_inspection_names_parameters(tmp_path: Path) -> None:
    report = inspect_adapter(write(tmp_path, fused(), target_parameters=BOTH), max_bytes=1 << 24)
    assert [(m.name, m.rank, m.scale) for m in report.modules] == [
        (f"{MLP}.experts.down_proj", R, ALPHA / R),
        (f"{MLP}.experts.gate_up_proj", R, ALPHA / R),
    ]


FORMER_NAMES = {"target_modules": ["gate", "w1", "w2", "w3"]}
W1 = f"{FORMER}.experts.1.w1"
A_OF_W1 = f"{W1}.lora_A.weight"


def without(tensors: Tensors, *parts: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if not any(part in key for part in parts)}


REFUSED: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "text": (fused(), {"target_parameters": "down_proj"}, "expected a list of names"),
    "dora": (fused(), {"target_parameters": BOTH, "use_dora": True}, "target_parameters and use_dora"),
    "nothing named": (fused(), {"target_modules": ["q_proj"]}, "target_parameters name 0"),
    "too deep": (fused(), {"target_parameters": BOTH[:1]}, "target_parameters name 1"),
    "unknown": (pair(f"{KEY}.gate", HIDDEN, NUM), {"target_parameters": ["w.x"], **FORMER_NAMES}, "the base has not"),
    "other form": (pair("base_model.model.model.layers.1.mlp.experts.3.w1", 4, 4), FORMER_NAMES, "of another form"),
    "shape": (
        fused() | pair(f"{KEY}.experts", INNER, HIDDEN, NUM),
        {"target_parameters": BOTH},
        r"expected \[12, 20\]",
    ),
    "bias": (
        fused() | {f"{KEY}.experts.bias": np.zeros(3, np.float32)},
        {"target_parameters": BOTH, "bias": "all"},
        "has bias, lora_A, lora_B, not lora_A and lora_B",
    ),
    "embedding": (
        {f"{KEY}.experts.lora_embedding_{half}": np.zeros((R, R), np.float32) for half in "AB"},
        {"target_parameters": BOTH},
        "has lora_embedding_A, lora_embedding_B, not",
    ),
    "extra expert": (
        single() | pair(f"{FORMER}.experts.3.w1", HIDDEN, INNER),
        FORMER_NAMES,
        "experts.3.w1' does not exist",
    ),
    "root": (single(), FORMER_NAMES | {"use_rslora": True}, "use_rslora with weights of single experts"),
    "no target": (single(), {"target_modules": ["gate", "w1", "w2"]}, "w3' has weights, but is no target"),
    "both forms": (single() | fused(), FORMER_NAMES | {"target_parameters": BOTH}, "stored twice"),
    "two names": (single() | pair(f"{KEY}.experts.1.w1", HIDDEN, INNER), FORMER_NAMES, "stored twice"),
    "two routers": (single() | pair(f"{KEY}.gate", HIDDEN, NUM), FORMER_NAMES, "stored twice"),
    "ranks": (single() | pair(W1, HIDDEN, INNER, 2), FORMER_NAMES, r"experts.1.w1' has shape \[2, 32\]"),
    "scales": (single(), FORMER_NAMES | {"alpha_pattern": {"experts.1.w1": 3}}, "2 pairs of rank and scale"),
    "router whole": (
        {f"{KEY}.gate.modules_to_save.weight": np.zeros((NUM, HIDDEN), np.float32)},
        {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
        "is a router and has saved",
    ),
    "dora of single": (
        single() | {f"{W1}.lora_magnitude_vector": np.ones(INNER, np.float32)},
        FORMER_NAMES | {"use_dora": True},
        "no lora_magnitude_vector",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_would_not_apply_is_refused(case: str, tmp_path: Path) -> None:
    tensors, settings, words = REFUSED[case]
    with pytest.raises(AdapterError, match=words):
        read_adapter("x", write(tmp_path, tensors, **settings), RULES)


@pytest.mark.parametrize(
    ("tensors", "settings", "words"),
    [
        (without(fused(), "base_layer"), {"target_parameters": BOTH}, "shape|holds no weights"),
        (without(single(), "experts.2.w3"), FORMER_NAMES, "no w3 of expert 2"),
        (without(single(), ".w3."), FORMER_NAMES, "no w3 of expert 0"),
    ],
)
def test_weights_that_are_missing_are_named(
    tensors: Tensors, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsMissing, match=words):
        read_adapter("x", write(tmp_path, tensors, **settings), RULES)
