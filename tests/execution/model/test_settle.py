"""Vectors that depend on the base are settled group by group, before their pages count as there."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_adapters import adapter_config, adapter_tensors, tiny_base, write_good_adapter
from safetensors.numpy import load_file, save_file

from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.adapters.shape import BaseShape, ModuleKind, TargetModule
from manylora.core.errors import AdapterError
from manylora.execution.kernels.linear import reorder, rows_of
from manylora.execution.model.settle import BaseGroup, BaseNorm, Settling
from manylora.execution.storage.host_tier import HostTier
from manylora.lab.sim.build import SimulatedReader

BASE = tiny_base(block_size=1, num_layers=3)
TARGETS = ("q_proj", "v_proj", "down_proj")


def groups_of(base: BaseShape) -> dict[str, BaseGroup]:
    """Random weights: of q, k and v in two parts, as where their formats differ."""
    torch.manual_seed(0)
    sizes: dict[str, tuple[int, int]] = {}
    for module in base.modules:
        sizes[module.group] = module.offset + module.out_features, module.in_features
    own = {}
    for group, (rows, columns) in sizes.items():
        weight = torch.randn(columns, rows) if "embed" in group else torch.randn(rows, columns)
        parts = (weight[:20], weight[20:]) if group.endswith("qkv") else (weight,)
        own[group] = BaseGroup(parts, None)
    return own


def write_dora(directory: Path, rank: int = 4, magnitude: float = 1.0) -> Path:
    write_good_adapter(directory, BASE, rank=rank, targets=TARGETS, use_dora=True)
    tensors = adapter_tensors(BASE, rank, TARGETS)
    for module in BASE.modules:
        if module.name.rpartition(".")[2] in TARGETS:
            key = f"base_model.model.{module.name}.lora_magnitude_vector"
            tensors[key] = np.linspace(0.5, 1.5, module.out_features, dtype=np.float32) * np.float32(magnitude)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def read(directory: Path, dtype: str | None = None) -> PackedAdapter:
    return read_adapter("mine", directory, ReadRules(base=BASE, max_bytes=1 << 24, dtype=dtype))


def factors(tier: HostTier, packed: PackedAdapter) -> dict[str, torch.Tensor]:
    adapter = tier.get(packed.version.key)
    assert adapter is not None
    found = {}
    for group in adapter.in_place().groups.values():
        for module, part in zip(group.modules, group.layout.modules, strict=True):
            found[part.module.name] = torch.cat([piece.weight[0] for piece in module.factor])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_are_magnitudes_over_the_lengths_of_rows(dtype: str, tmp_path: Path) -> None:
    """In float32 beside matrices of 16 bits, in tiles that pages cut."""
    own, packed = groups_of(BASE), read(write_dora(tmp_path / "a"), dtype)
    tier = HostTier(is_pinned=False, settle=partial(Settling.of, own))
    tier.put(packed)
    tensors = adapter_tensors(BASE, 4, TARGETS)
    found = factors(tier, packed)
    assert len(found) == 9
    for module in BASE.modules:
        if module.name in found:
            key = f"base_model.model.{module.name}"
            delta = 2 * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
            weight = own[module.group].rows(module.offset, module.offset + module.out_features).numpy()
            expected = np.linspace(0.5, 1.5, module.out_features) / np.linalg.norm(weight + delta, axis=1)
            np.testing.assert_allclose(found[module.name], expected, rtol=1e-5 if dtype == "float32" else 1e-2)


def test_pages_count_once_all_that_is_in_them_is_settled(tmp_path: Path) -> None:
    packed = read(write_dora(tmp_path / "a"))
    whole = HostTier(is_pinned=False, settle=partial(Settling.of, groups_of(BASE)))
    whole.put(read(tmp_path / "a"))
    expected = whole.get(packed.version.key)
    assert expected is not None
    source = torch.from_numpy(packed.image.copy())
    packed.image[:] = 0
    tier = HostTier(is_pinned=False, settle=partial(Settling.of, groups_of(BASE)))
    adapter = tier.begin(packed)
    for num_pages in range(1, len(source) + 1):
        adapter.image[num_pages - 1] = source[num_pages - 1]
        adapter.advance(num_pages)
        arrived = adapter.arrival.num_arrived
        assert torch.equal(adapter.image[:arrived], expected.image[:arrived])
    assert adapter.arrival.is_complete


def test_an_adapter_that_leaves_no_finite_factor_is_refused_and_forgotten(tmp_path: Path) -> None:
    own = {group: BaseGroup([torch.zeros_like(w) for w in one.weights], None) for group, one in groups_of(BASE).items()}
    folder = write_dora(tmp_path / "a", magnitude=1e38)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {key: value * np.float32(1e-9 if "lora_A" in key else 1) for key, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    packed = read(folder)
    tier = HostTier(is_pinned=False, settle=partial(Settling.of, own))
    with pytest.raises(AdapterError, match="cancels a row of the base, or its numbers are too large"):
        tier.put(packed)
    assert tier.get(packed.version.key) is None


def test_a_norm_takes_the_place_of_the_base_s_where_that_is_not_0(tmp_path: Path) -> None:
    sizes = {"in_features": 32, "out_features": 32, "offset": 0, "has_bias": True}
    place = TargetModule(name="model.norm", kind=ModuleKind.NUMBERS, group="model.norm", layer=None, **sizes)
    base, folder = replace(BASE, modules=(*BASE.modules, place)), write_good_adapter(tmp_path / "a", BASE)
    tensors, key = adapter_tensors(BASE), "base_model.model.model.norm"
    save_file(
        tensors | {f"{key}.weight": np.full(32, 3, "f4"), f"{key}.bias": np.full(32, 5, "f4")},
        folder / "adapter_model.safetensors",
    )
    rules = ReadRules(base=base, max_bytes=1 << 24)
    with pytest.raises(AdapterError, match="bias is 'none'"):
        read_adapter("mine", folder, rules)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(modules_to_save=["norm"])))
    packed, norm = read_adapter("mine", folder, rules), torch.nn.LayerNorm(32)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    torch.nn.init.normal_(norm.bias)
    tier = HostTier(is_pinned=False, settle=partial(Settling.of, groups_of(BASE) | {"model.norm": BaseNorm.of(norm)}))
    tier.put(packed)
    adapter, x = tier.get(packed.version.key), torch.randn(4, 32)
    assert adapter is not None
    (module,) = adapter.in_place().groups["model.norm"].modules
    found = norm(x) * module.factor[0].weight + module.shift[0].weight
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, (32,)) * 3 + 5)
    with torch.no_grad():
        norm.weight[7] = 0
    tier = HostTier(is_pinned=False, settle=partial(Settling.of, groups_of(BASE) | {"model.norm": BaseNorm.of(norm)}))
    with pytest.raises(AdapterError, match=r"'model.norm' has a number where the base's weight is 0"):
        tier.put(packed)


def test_a_simulated_server_takes_as_many_pages_for_it(tmp_path: Path) -> None:
    packed = read(write_dora(tmp_path / "a"))
    simulated = SimulatedReader(BASE).read("mine", str(tmp_path / "a"))
    assert simulated.num_pages == packed.version.num_pages
    assert simulated.weight_bytes == packed.version.weight_bytes


def test_rows_of_a_packed_weight_are_its_own() -> None:
    weight = torch.randn(96, 64)
    packed = reorder(weight)
    torch.testing.assert_close(rows_of(packed, 10, 50), weight[10:50])
