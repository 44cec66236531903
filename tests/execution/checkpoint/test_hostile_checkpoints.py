"""Damaged and hostile quantised checkpoints: refused by file and tensor, or by field, before a weight is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import FILE, change_config, change_tensors, tiny, write_modules
from torch import Tensor

from manylora.core.errors import ConfigError
from manylora.execution.checkpoint import stored
from manylora.execution.checkpoint.open import open_checkpoint

GROUP = 8
MODULE = "model.layers.1.mlp.up_proj"  # 96 outputs, 72 inputs
Damage = Callable[[Path], object]


def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def codec(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def state(num_out: int, num_in: int, **fields: Any) -> Tensor:
    given = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [num_out, num_in], **fields}
    return torch.tensor(list(json.dumps(given).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
BASES: dict[str, tuple[Callable[[int, int], dict[str, Tensor]], dict[str, Any]]] = {
    "packed": (
        lambda rows, columns: {
            "weight_packed": words(rows, columns // 8),
            "weight_scale": torch.rand(rows, columns // GROUP),
            "weight_zero_point": words(rows // 8, columns // GROUP),
            "weight_shape": torch.tensor([rows, columns]),
        },
        codec(num_bits=4, strategy="group", group_size=GROUP, symmetric=False) | {"format": "pack-quantized"},
    ),
    "float8": (
        lambda rows, columns: {
            "weight": torch.randn(rows, columns).to(torch.float8_e4m3fn),
            "weight_scale": torch.rand(rows, 1),
        },
        codec(num_bits=8, type="float", strategy="channel") | {"format": "float-quantized"},
    ),
    "gptq": (
        lambda rows, columns: {
            "qweight": words(columns // 8, rows),
            "qzeros": words(columns // GROUP, rows // 8),
            "scales": torch.rand(columns // GROUP, rows).half(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
        },
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    ),
    "awq": (
        lambda rows, columns: {
            "qweight": words(columns, rows // 8),
            "qzeros": words(columns // GROUP, rows // 8),
            "scales": torch.rand(columns // GROUP, rows).half(),
        },
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "fp8": (
        lambda rows, columns: {
            "weight": torch.randn(rows, columns).to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.rand(rows // 8, columns // 8),
        },
        {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": ["lm_head"]},
    ),
    "bnb8": (
        lambda rows, columns: {
            "weight": integers(-127, 128, rows, columns, dtype=torch.int8),
            "SCB": torch.rand(rows),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        },
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
    ),
    "bnb4": (
        lambda rows, columns: {
            "weight": integers(0, 256, rows * columns // 2, 1, dtype=torch.uint8),
            "weight.absmax": integers(0, 256, -(-rows * columns // 64), dtype=torch.uint8),
            "weight.quant_map": torch.linspace(-1, 1, 16),
            "weight.nested_absmax": torch.rand(-(-rows * columns // 64 // 256)),
            "weight.nested_quant_map": torch.linspace(0, 1, 256),
            STATE: state(rows, columns, nested_blocksize=256, nested_offset=0.1, nested_dtype="float32"),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "torchao": (
        lambda rows, columns: {
            "_weight_qdata": integers(-8, 8, rows, columns, dtype=torch.int8),
            "_weight_scale": torch.rand(rows, columns // GROUP),
            "_weight_zero_point": torch.zeros(rows, columns // GROUP, dtype=torch.int8),
        },
        {"quant_method": "torchao", "quant_type": {"default": {}}},
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    for name, (make, fields) in BASES.items():
        write_modules(tmp / name, make, fields)
    change_metadata(lambda entries: None)(tmp / "torchao")
    return tmp


def change_metadata(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return a change of torchao's metadata, which says what each tensor is."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / FILE)
        names = [name.removesuffix("._weight_qdata") for name in tensors if name.endswith("_weight_qdata")]
        data = {"block_size": [1, GROUP], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
        entries: dict[str, Any] = {
            f"{name}.weight": {"_type": "IntxUnpackedToInt8Tensor", "_data": dict(data)} for name in names
        }
        entries |= {name: {"_type": "Tensor"} for name in tensors if not name.rpartition(".")[2].startswith("_")}
        change(entries)
        save_file(tensors, folder / FILE, {name: json.dumps(entry) for name, entry in entries.items()})

    return damage


def tensor(leaf: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """Return a change of a tensor beside the module; ``None`` takes it out."""
    name = f"{MODULE}.{leaf}"

    def apply(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    return lambda folder: change_tensors(folder, apply)


def entry(leaf: str, place: tuple[int, ...], value: float) -> Damage:
    def change(tensor: Tensor) -> Tensor:
        tensor[place] = value
        return tensor

    return tensor(leaf, change)


def add(**leaves: Tensor) -> Damage:
    parts = {f"{MODULE}.{leaf}": value for leaf, value in leaves.items()}
    return lambda folder: change_tensors(folder, lambda tensors: tensors.update(parts))


def config(**fields: Any) -> Damage:
    return lambda folder: change_config(folder, lambda found: found.update(fields))


def scheme(**fields: Any) -> Damage:
    return lambda folder: change_config(
        folder, lambda found: found["config_groups"]["group_0"]["weights"].update(fields)
    )


def group(**fields: Any) -> Damage:
    return lambda folder: change_config(folder, lambda found: found["config_groups"]["group_0"].update(fields))


def plain_weight(folder: Path) -> None:
    """Store one module's weight as numbers."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{MODULE}.")]:
            del tensors[name]
        tensors[f"{MODULE}.weight"] = torch.randn(96, 72)

    change_tensors(folder, change)


def cut(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-7])


def regroup(folder: Path, size: int) -> None:
    """Store scales of groups of another size, rounded up."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            rows, columns = tensors[name].shape
            groups = -(-columns * GROUP // size)
            tensors[name] = torch.rand(rows, groups)
            tensors[name.replace("scale", "zero_point")] = words(rows // 8, groups)

    change_tensors(folder, change)


NAN8 = 0x7F
HOSTILE: dict[str, tuple[str, Damage, str]] = {
    "an unknown method": ("packed", config(quant_method="hqq"), r"quant_method = 'hqq', expected one of awq, bits"),
    "a method that is no name": ("packed", config(quant_method=["awq"]), r"quant_method = \['awq'\], expected one of"),
    "no method": ("packed", config(quant_method=None), "quant_method = None, expected one of awq"),
    "a configuration that is no object": (
        "packed",
        lambda folder: (folder / "config.json").write_text(
            json.dumps(json.loads((folder / "config.json").read_text()) | {"quantization_config": "int4"})
        ),
        r"config\.json cannot be read: AttributeError",
    ),
    "a truncated file": ("packed", cut, r"model\.safetensors is damaged or is no safetensors file"),
    "an unknown format": ("packed", config(format="nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized', expected"),
    "mxfp4": ("packed", group(format="mxfp4-pack-quantized"), r"group_0 has format = 'mxfp4-pack-quantized', expected"),
    "sparsity": (
        "packed",
        config(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config = .* expected none",
    ),
    "transforms": (
        "packed",
        config(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
        "transform_config = .*, expected none",
    ),
    "a preset": ("packed", config(config_groups={"W4A16": ["Linear"]}), r"W4A16 is \['Linear'\], expected an object"),
    "3 bits": ("packed", scheme(num_bits=3), "num_bits = 3, expected one of 4 of type int, 8 of type int, for"),
    "codes of floats": ("packed", scheme(type="float"), "num_bits = 4, expected one of 4 of type int"),
    "an unknown strategy": ("packed", scheme(strategy="tensor_group"), "strategy = 'tensor_group', expected one of"),
    "a group of 0": ("packed", scheme(group_size=0), "group_size = 0, expected a positive number"),
    "a group that is no number": ("packed", scheme(group_size="8"), "group_size = '8', expected a value of type int"),
    "a group that does not divide": (
        "packed",
        lambda folder: (regroup(folder, 24), scheme(group_size=24)(folder)),
        r"has tensor '.*o_proj\.weight_scale' for groups of 24 inputs, which do not divide 40",
    ),
    "another group": (
        "packed",
        scheme(group_size=4),
        r"weight_scale' of shape \[40, 9\], expected a number for each block of \[1, 4\] of a weight of",
    ),
    "no blocks": ("float8", scheme(strategy="block"), "block_structure = None, expected two positive numbers"),
    "bad blocks": (
        "float8",
        scheme(strategy="block", block_structure=[0, 8]),
        r"block_structure = \[0, 8\], expected two positive numbers",
    ),
    "an expression that is none": (
        "packed",
        config(ignore=["re:("]),
        "quantization_config has an expression that cannot be used: .* is no regular expression",
    ),
    "names that are none": ("packed", config(ignore=[1]), r"ignore = \[1\], expected a list of names"),
    "no scale": ("packed", tensor("weight_scale", lambda _: None), rf"lacks tensor '{MODULE}\.weight_scale'"),
    "no codes": ("packed", tensor("weight_packed", lambda _: None), rf"lacks tensor '{MODULE}\.weight_packed'"),
    "no shape": ("packed", tensor("weight_shape", lambda _: None), rf"lacks tensor '{MODULE}\.weight_shape'"),
    "another shape": ("packed", entry("weight_shape", (1,), 64), r"weight_shape' of \[96, 64\], expected \[96, 72\]"),
    "codes of another shape": (
        "packed",
        tensor("weight_packed", lambda codes: codes[:, 1:]),
        r"model\.safetensors has tensor 'model\..*weight_packed' of shape \[96, 8\], expected \[96, 9\]",
    ),
    "codes of another type": (
        "packed",
        tensor("weight_packed", lambda codes: codes.long()),
        r"weight_packed' of type I64, expected I32",
    ),
    "scales of another type": (
        "packed",
        tensor("weight_scale", lambda scale: scale.double()),
        "weight_scale' of type F64, expected one of F32, F16, BF16",
    ),
    "zero points of another shape": (
        "packed",
        tensor("weight_zero_point", lambda zero: zero[1:]),
        r"weight_zero_point' of shape \[11, 9\], expected \[12, 9\]",
    ),
    "a scale that is no number": (
        "packed",
        entry("weight_scale", (5, 3), float("nan")),
        rf"model\.safetensors has tensor '{MODULE}\.weight_scale' of a weight with a scale of nan at \[5, 3\]",
    ),
    "a shift without bound": (
        "packed",
        entry("weight_scale", (5, 3), 3e38),
        r"of a weight with a shift of -?inf at \[5, 3\]",
    ),
    "groups of other sizes": (
        "packed",
        add(weight_g_idx=torch.zeros(72, dtype=torch.int32)),
        "weight_g_idx' of other groups than 0 to 8, with 8 inputs each",
    ),
    "groups that are not there": (
        "gptq",
        entry("g_idx", (3,), 9),
        rf"tensor '{MODULE}\.g_idx' of other groups than 0 to 8, with 8 inputs each",
    ),
    "no groups where they are announced": (
        "packed",
        scheme(actorder="group"),
        r"lacks tensor '.*q_proj\.weight_g_idx'",
    ),
    "no groups where GPTQ announces them": (
        "gptq",
        lambda folder: (config(desc_act=True)(folder), tensor("g_idx", lambda _: None)(folder)),
        rf"lacks tensor '{MODULE}\.g_idx'",
    ),
    "numbers where codes are announced": (
        "packed",
        plain_weight,
        rf"tensor '{MODULE}\.weight' without weight_scale or .*, which quantization_config announces",
    ),
    "numbers where GPTQ is announced": ("gptq", plain_weight, rf"tensor '{MODULE}\.weight' without qweight or qzeros"),
    "codes where none are announced": (
        "packed",
        config(ignore=["lm_head", MODULE]),
        rf"tensor '{MODULE}\.weight_scale' of codes, where quantization_config announces numbers",
    ),
    "codes that fp8 leaves out": (
        "fp8",
        config(modules_to_not_convert=["lm_head", "model.layers.1.mlp"]),
        r"weight_scale_inv' of codes, where quantization_config announces numbers",
    ),
    "codes of nothing": (
        "packed",
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({"model.layers.0.extra.weight_packed": words(8, 1)})
        ),
        r"has tensor 'model\.layers\.0\.extra\.weight_packed', which no part of LlamaForCausalLM takes",
    ),
    "a weight twice": (
        "packed",
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({f"{MODULE.removeprefix('model.')}.weight": torch.randn(96, 72)})
        ),
        rf"for '{MODULE}\.weight', which another tensor is as well",
    ),
    "codes and numbers": (
        "packed",
        add(weight=torch.randn(96, 72)),
        rf"tensor '{MODULE}\.weight' and .*weight_packed, of which one was expected",
    ),
    "codes of AWQ and numbers": (
        "awq",
        add(weight=torch.randn(96, 72)),
        rf"for '{MODULE}\.weight', which another tensor is as well",
    ),
    "a norm of codes": (
        "packed",
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(72, dtype=torch.int8)})
        ),
        r"'model\.norm\.weight' of type I8, expected one of F64, F32, F16, BF16",
    ),
    "float8 without a number": (
        "float8",
        tensor("weight", lambda codes: codes.view(torch.uint8).fill_(NAN8).view(torch.float8_e4m3fn)),
        rf"tensor '{MODULE}\.weight_scale' of a weight with the code 0x7f at \[0, 0\], which is no finite number",
    ),
    "float8 as integers": (
        "float8",
        tensor("weight", lambda codes: codes.view(torch.int8)),
        rf"tensor '{MODULE}\.weight' of type I8, expected one of F8_E4M3, F8_E5M2",
    ),
    "float8 without scales": (
        "float8",
        tensor("weight_scale", lambda _: None),
        rf"'{MODULE}\.weight' of type F8_E4M3, expected one of F64, F32, F16, BF16",
    ),
    "fp8 in blocks of another size": (
        "fp8",
        config(weight_block_size=[16, 8]),
        r"weight_scale_inv' of shape \[5, 9\], expected a number for each block of \[16, 8\]",
    ),
    "fp8 in blocks of nothing": ("fp8", config(weight_block_size=[8]), r"weight_block_size = \[8\], expected two"),
    "fp4 experts": ("fp8", config(expert_dtype="fp4"), "expert_dtype = 'fp4', expected fp8"),
    "GPTQ of 3 bits": ("gptq", config(bits=3), "bits = 3, expected one of 4, 8"),
    "GPTQ of no bits": ("gptq", config(bits=None), "bits = None, expected 4 or 8"),
    "GPTQ for Marlin": (
        "gptq",
        config(checkpoint_format="marlin"),
        "checkpoint_format = 'marlin', expected one of gptq",
    ),
    "GPTQ by module": ("gptq", config(dynamic={"+:x": {"bits": 8}}), r"dynamic = \{.*\}, expected \{\}"),
    "GPTQ in other groups": ("gptq", config(group_size=-2), "group_size = -2, expected -1 or a positive number"),
    "GPTQ in groups of 4": ("gptq", config(group_size=4), r"qzeros' of shape \[9, 5\], expected \[18, 5\]"),
    "GPTQ with an infinite scale": (
        "gptq",
        entry("scales", (2, 7), float("inf")),
        rf"tensor '{MODULE}\.qweight' of a weight with a scale of inf at \[7, 2\]",
    ),
    "GPTQ without zero points": ("gptq", tensor("qzeros", lambda _: None), rf"lacks tensor '{MODULE}\.qzeros'"),
    "GPTQ of shorter rows": (
        "gptq",
        tensor("qweight", lambda codes: codes[:, :-1]),
        r"qweight' of shape \[9, 95\], expected \[9, 96\]",
    ),
    "AWQ of another packing": ("awq", config(version="gemv"), "version = 'gemv', expected gemm"),
    "AWQ without zero points": ("awq", config(zero_point=False), "zero_point = False, expected True"),
    "AWQ of 8 bits": ("awq", config(bits=8), "bits = 8, expected 4"),
    "AWQ in groups that do not divide": (
        "awq",
        config(group_size=64),
        "has 72 inputs and 40 outputs by config.json, expected multiples of group_size 64 and of 8",
    ),
    "AWQ with scales of integers": (
        "awq",
        tensor("scales", lambda scales: scales.short()),
        rf"tensor '{MODULE}\.scales' of type I16, expected one of F32, F16, BF16",
    ),
    "both of bitsandbytes": ("bnb8", config(load_in_4bit=True), "load_in_4bit = True, expected true, or load_in_8bit"),
    "8 bits in tiles": ("bnb8", entry("weight_format", (), 1), r"weight_format' of 1, expected 0 \(rows\)"),
    "8 bits without scales": ("bnb8", tensor("SCB", lambda _: None), rf"lacks tensor '{MODULE}\.SCB'"),
    "8 bits of fewer scales": (
        "bnb8",
        tensor("SCB", lambda scale: scale[1:]),
        r"SCB' of shape \[95\], expected \[96\]",
    ),
    "another table": (
        "bnb4",
        config(bnb_4bit_quant_type="fp4"),
        "quant_state.bitsandbytes__nf4' and 13 more, which no part",
    ),
    "fewer codes": (
        "bnb4",
        tensor("weight", lambda codes: codes[1:]),
        rf"'{MODULE}\.weight' of 3455 bytes, expected 96 \* 72 / 2",
    ),
    "a state of nothing": ("bnb4", tensor(STATE, lambda _: torch.zeros(9, dtype=torch.uint8)), "no state of nf4"),
    "a state of another shape": (
        "bnb4",
        tensor(STATE, lambda _: state(72, 96)),
        r"bitsandbytes__nf4' which is no state of nf4 for a weight of shape \[96, 72\]",
    ),
    "blocks of 0": ("bnb4", tensor(STATE, lambda _: state(96, 72, blocksize=0)), "no state of nf4"),
    "nested blocks of nothing": (
        "bnb4",
        tensor(STATE, lambda _: state(96, 72, nested_blocksize=-1)),
        "no state of nf4",
    ),
    "a nested offset that is no number": (
        "bnb4",
        tensor(STATE, lambda _: state(96, 72, nested_blocksize=256, nested_offset=float("nan"))),
        r"of a weight with a scale of nan at \[0, 0\]",
    ),
    "fewer maxima": (
        "bnb4",
        tensor("weight.absmax", lambda found: found[1:]),
        r"weight\.absmax' of shape \[107\], expected \[108\]",
    ),
    "a table of other length": (
        "bnb4",
        tensor("weight.quant_map", lambda table: table[1:]),
        r"quant_map' of shape \[15\], expected \[16\]",
    ),
    "a table without a number": (
        "bnb4",
        entry("weight.quant_map", (3,), float("inf")),
        r"of a weight with a table of inf at \[3\]",
    ),
    "an int4 of torchao with more bits": (
        "torchao",
        entry("_weight_qdata", (0, 0), 9),
        "_weight_qdata' of integers of more than 4 bits",
    ),
    "a packed tensor of torchao": (
        "torchao",
        change_metadata(lambda entries: entries[f"{MODULE}.weight"].update(_type="Int4TilePackedTo4dTensor")),
        "Int4TilePackedTo4dTensor.*expected Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor or Tensor",
    ),
    "blocks of torchao that are none": (
        "torchao",
        change_metadata(lambda entries: entries[f"{MODULE}.weight"]["_data"].update(block_size=[1, -8])),
        "with a block_size and",
    ),
    "other blocks of torchao": (
        "torchao",
        change_metadata(lambda entries: entries[f"{MODULE}.weight"]["_data"].update(block_size=[1, 24])),
        r"_weight_scale' of shape \[96, 9\], expected a number for each block of \[1, 24\]",
    ),
    "codes without torchao's metadata": (
        "torchao",
        change_metadata(lambda entries: entries.pop(f"{MODULE}.weight")),
        "_weight_qdata' of codes, where quantization_config announces numbers",
    ),
    "no codes of torchao": ("torchao", tensor("_weight_qdata", lambda _: None), r"lacks tensor '.*_weight_qdata'"),
}


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    for name in checkpoint.names:
        checkpoint.linear(name)


@pytest.mark.parametrize("base", BASES)
def test_sound_ones_are_read(bases: Path, base: str) -> None:
    read_all(bases / base)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_ones_are_refused(bases: Path, tmp_path: Path, case: str) -> None:
    base, damage, message = HOSTILE[case]
    folder = tmp_path / "base"
    shutil.copytree(bases / base, folder)
    damage(folder)
    with pytest.raises(ConfigError, match=message) as raised:
        read_all(folder)
    assert str(raised.value).startswith(f"Got model = {str(folder)!r}")


def test_expressions_take_bounded_time(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MATCH_SECONDS", 0.05)
    folder = tmp_path / "base"
    shutil.copytree(bases / "packed", folder)
    config(ignore=["lm_head", "re:(.|..|...)+[!?]"])(folder)
    with pytest.raises(ConfigError, match="take too long to match"):
        open_checkpoint(str(folder))


def test_codes_without_a_configuration(bases: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(bases / "float8", folder)
    tiny().save_pretrained(folder)
    with pytest.raises(ConfigError, match="weight_scale' and 13 more, which no part of LlamaForCausalLM takes"):
        open_checkpoint(str(folder))
