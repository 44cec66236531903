"""Kinds that are folded into A and B, and files in float8: what PEFT adds to a weight, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_adapters import adapter_config, adapter_tensors, tiny_base, write_good_adapter
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftModel, VeraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from unpacked import unpack

from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.read import HeaderReader, ReadRules, read_adapter
from manylora.core.adapters.report import inspect_adapter
from manylora.core.adapters.tensors import FLOAT_DTYPES, StoredTensor
from manylora.core.errors import AdapterError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT's own, of AdaLoRA's masks, which are named by other rules than its rank patterns.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning"),
]

BASE = tiny_base(num_layers=2)
RULES = ReadRules(base=BASE, max_bytes=1 << 24)
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"

KINDS: dict[str, Any] = {
    "adalora": AdaLoraConfig(init_r=5, target_r=2, total_step=10, lora_alpha=7, target_modules=["q_proj", "down_proj"]),
    "vera": VeraConfig(r=6, target_modules=["q_proj", "k_proj", "down_proj"]),
    "loha": LoHaConfig(r=3, alpha=4, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 2}),
    "lokr": LoKrConfig(r=2, alpha=3, target_modules=["q_proj", "down_proj"], alpha_pattern={"q_proj": 5}),
    "lokr-whole": LoKrConfig(r=64, alpha=3, target_modules=["v_proj", "down_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lokr-both": LoKrConfig(r=1, decompose_both=True, decompose_factor=4, target_modules=["o_proj", "gate_proj"]),
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def save(kind: str, path: Path) -> Path:
    torch.manual_seed(0)
    tuned = get_peft_model(tiny_llama(), deepcopy(KINDS[kind]))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    if kind == "adalora":
        names = [n.removeprefix("base_model.model.") for n, _ in tuned.named_parameters() if "lora_E" in n]
        masks = [[True, False, True, number > 0, False] for number in range(len(names))]
        masks[1] = [False] * 5
        tuned.peft_config["default"].rank_pattern = dict(zip(names, masks, strict=True))
    tuned.save_pretrained(path)
    return path


def read(directory: Path) -> PackedAdapter:
    return read_adapter("mine", directory, RULES)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ia3"])
def test_every_module_gets_exactly_what_peft_adds(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / "a")
    loaded = PeftModel.from_pretrained(tiny_llama(), str(folder))
    expected = {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default").detach().numpy()
        for name, layer in loaded.named_modules()
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "get_delta_weight")
    }
    expected = {name: delta for name, delta in expected.items() if delta.any()}
    packed = read(folder)
    ours = {part.module.name for group in packed.layout.groups.values() for part in group.modules}
    assert ours == set(expected) and ours
    for name, delta in expected.items():
        a, b = unpack(packed, name)
        np.testing.assert_allclose(b @ a, delta, rtol=1e-5, atol=2e-6)
    header = HeaderReader(RULES).read("mine", folder)
    assert (header.num_pages, header.rank) == (packed.version.num_pages, packed.version.rank)
    assert read(folder).version.key == packed.version.key
    report = inspect_adapter(folder, BASE, max_bytes=1 << 24)
    assert report.fits and report.version is not None and report.version.rank == packed.version.rank


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_whose_base_was_converted_is_plain_lora(init: str, tmp_path: Path) -> None:
    config = LoraConfig(r=3, lora_alpha=3, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    before = {name: w.detach().clone() for name, w in tiny_llama().named_parameters()}
    tuned = get_peft_model(tiny_llama(), config)
    tuned.peft_config["default"].init_lora_weights = True
    tuned.save_pretrained(tmp_path / "initial")
    tuned.peft_config["default"].init_lora_weights = init
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / "mine", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    merged = dict(tuned.merge_and_unload().named_parameters())
    packed = read(tmp_path / "mine")
    assert packed.version.rank == 6
    for group in packed.layout.groups.values():
        for part in group.modules:
            name = f"{part.module.name}.weight"
            a, b = unpack(packed, part.module.name)
            np.testing.assert_allclose(b @ a, (merged[name] - before[name]).detach(), atol=1e-5)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_every_float8_number_is_the_one_torch_reads(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    theirs = codes.view({"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[dtype]).float()
    assert FLOAT_DTYPES[dtype].itemsize == 1
    np.testing.assert_array_equal(StoredTensor(dtype, (256,), codes.numpy()).as_float32(), theirs.numpy())


def test_float8_files_are_kept_in_sixteen_bits(tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    tensors = {key: torch.from_numpy(value) for key, value in adapter_tensors(BASE).items()}
    for name, dtype in (("narrow", torch.float8_e4m3fn), ("wide", torch.float32)):
        write_good_adapter(tmp_path / name, BASE)
        rounded = {key: value.to(torch.float8_e4m3fn).to(dtype) for key, value in tensors.items()}
        save_torch(rounded, tmp_path / name / "adapter_model.safetensors")
    rules = ReadRules(base=BASE, max_bytes=1 << 24, dtype="auto")
    narrow, wide = (read_adapter(name, tmp_path / name, rules) for name in ("narrow", "wide"))
    assert narrow.layout.dtype == wide.layout.dtype == "bfloat16"
    np.testing.assert_array_equal(narrow.image, wide.image)
    assert HeaderReader(rules).read("narrow", tmp_path / "narrow").dtype == "bfloat16"


Change = Callable[[dict[str, Any], dict[str, Any]], object]


def put(part: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({f"{Q0}.{part}": np.ones(shape, np.float32)})


REFUSED: dict[str, tuple[str, Change, str]] = {
    "vera without projections": ("vera", lambda c, t: c.update(save_projection=False), "save_projection is false"),
    "vera without a": ("vera", lambda c, t: t.pop("base_model.vera_A"), "holds no vera_A"),
    "vera too narrow": (
        "vera",
        lambda c, t: t.update({"base_model.vera_B": np.ones((31, 6), "f4")}),
        "vera_B has shape",
    ),
    "vera of another rank": ("vera", put("vera_lambda_d", 5), "vera_lambda_d .* expected \\[6\\]"),
    "adalora without e": ("adalora", lambda c, t: t.pop(f"{Q0}.lora_E"), "has no lora_E"),
    "adalora without rank": ("adalora", lambda c, t: c.update(init_r=0), "init_r is 0"),
    "adalora rows": ("adalora", put("lora_E", 1, 1), "lora_A .* expected \\[1, 32\\]"),
    "loha of another rank": ("loha", put("hada_w1_b", 4, 32), "hada_w1_b .* expected \\[3, 32\\]"),
    "loha conv": ("loha", put("hada_t1", 3, 3), "not understood"),
    "loha integers": ("loha", lambda c, t: t.update({f"{Q0}.hada_w1_b": np.ones((3, 32), np.int8)}), "holds I8"),
    "lokr product": ("lokr", put("lokr_w1", 4, 5), "Kronecker product of 40 columns, expected 32"),
    "lokr empty": ("lokr", put("lokr_w1", 0, 4), "lokr_w1 of shape \\[0, 4\\]"),
    "lokr both": ("lokr", put("lokr_w1_a", 4, 4), "lokr_w1 and lokr_w1_a"),
    "lokr half": ("lokr", lambda c, t: t.pop(f"{Q0}.lokr_w2_b"), "has no lokr_w2_b"),
    "lokr rank": (
        "lokr",
        lambda c, t: (t.update({f"{Q0}.lokr_w2_a": np.ones((8, 20_000), "f4")}), put("lokr_w2_b", 20_000, 8)(c, t)),
        "rank 80000 as LoRA, expected at most 65536",
    ),
    "adalora bias": (
        "adalora",
        lambda c, t: c.update(bias="all"),
        "bias is 'all', which is not supported beside ADALORA",
    ),
    "adalora dora": ("adalora", lambda c, t: c.update(use_dora=True), "use_dora is set, which is not supported beside"),
    "vera bias": ("vera", lambda c, t: c.update(bias="vera_only"), "bias is 'vera_only'"),
    "ia3 input": (
        "ia3",
        lambda c, t: None,
        "scales its input, which is possible only of the last linear",
    ),
    "ia3 shape": (
        "ia3",
        lambda c, t: t.update({Q0.replace("q_proj", "k_proj") + ".ia3_l": np.ones((2, 3), "f4")}),
        "ia3_l of module .* has shape \\[2, 3\\]",
    ),
    "whole module": ("lokr", lambda c, t: c.update(modules_to_save=["norm"]), "modules_to_save is set"),
    "unknown setting": ("lokr", lambda c, t: c.update(new_thing=3), "unknown setting 'new_thing'"),
    "missing module": ("loha", lambda c, t: [t.pop(k) for k in list(t) if "layers.1" in k], "no weights for it"),
    "not finite": ("lokr", lambda c, t: t[f"{Q0}.lokr_w1"].fill(np.inf), "not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_what_peft_adds_is_refused(case: str, tmp_path: Path) -> None:
    kind, change, message = REFUSED[case]
    folder = save(kind, tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=message):
        read(folder)


def test_a_small_file_of_a_large_rank_is_refused_by_its_pages(tmp_path: Path) -> None:
    folder = save("vera", tmp_path / "a")
    num_pages = read(folder).version.num_pages
    rules = ReadRules(base=BASE, max_bytes=1 << 24, max_pages=max(1, num_pages // 4))
    with pytest.raises(AdapterError, match="--max-adapter-share"):
        HeaderReader(rules).read("mine", folder)


def test_a_bias_that_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE, bias="lora_only")
    tensors = adapter_tensors(BASE) | {f"{Q0}.base_layer.bias": np.ones(32, np.float32)}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="has a trained bias, but none in the base"):
        read(folder)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config()))
    with pytest.raises(AdapterError, match="is a trained bias, but bias is 'none'"):
        read(folder)
