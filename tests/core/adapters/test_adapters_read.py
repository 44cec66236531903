import json
import time
from pathlib import Path

import numpy as np
import pytest
from bad_adapters import BAD_ADAPTERS, BadAdapter, adapter_config, adapter_tensors, tiny_base, write_good_adapter
from safetensors.numpy import save_file
from unpacked import unpack

from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.adapters.report import inspect_adapter
from manylora.core.adapters.shape import BaseShape
from manylora.core.errors import AdapterError

BASE = tiny_base()
LIMIT = 64 * 1024 * 1024


def read(path: Path, base: BaseShape = BASE, max_bytes: int = LIMIT) -> PackedAdapter:
    return read_adapter("mine", path, ReadRules(base=base, max_bytes=max_bytes))


@pytest.mark.parametrize("bad", BAD_ADAPTERS, ids=lambda bad: bad.slug)
def test_a_bad_adapter_is_refused_by_name(bad: BadAdapter, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    directory.mkdir()
    bad.build(directory, BASE)
    started = time.process_time()
    with pytest.raises(AdapterError) as caught:
        read(directory)
    assert type(caught.value) is bad.error
    assert caught.value.adapter == "mine"
    for word in bad.words:
        assert word in caught.value.reason
    assert len(str(caught.value)) < 600
    assert str(tmp_path) not in caught.value.reason
    assert not (directory / "executed").exists()
    assert time.process_time() - started < 10.0


def test_the_corpus_is_a_corpus() -> None:
    assert len(BAD_ADAPTERS) >= 35
    assert len({bad.slug for bad in BAD_ADAPTERS}) == len(BAD_ADAPTERS)


TARGETS = ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_what_is_packed_can_be_unpacked(dtype: str, tolerance: float, tmp_path: Path) -> None:
    base = tiny_base(dtype=dtype)
    packed = read(write_good_adapter(tmp_path / "a", base, rank=5, targets=TARGETS, lora_alpha=15), base)
    tensors = adapter_tensors(base, 5, TARGETS)
    changed = [m for m in base.modules if m.name.rpartition(".")[2] in TARGETS]
    assert packed.version.num_modules == len(changed) == 8
    for module in changed:
        stored = [v for k, v in tensors.items() if k.startswith(f"base_model.model.{module.name}.")]
        a, b = unpack(packed, module.name)
        np.testing.assert_allclose(a, stored[0], rtol=tolerance, atol=1e-6 if dtype == "float16" else 0)
        np.testing.assert_allclose(b, stored[1] * np.float32(3), rtol=tolerance, atol=1e-6 if dtype == "float16" else 0)
    with pytest.raises(KeyError):
        unpack(packed, "model.layers.0.mlp.up_proj")


def test_sizes_of_a_version(tmp_path: Path) -> None:
    directory = write_good_adapter(tmp_path / "a", BASE, rank=5, targets=TARGETS)
    packed = read(directory)
    version = packed.version
    elements = sum(a.size for a in adapter_tensors(BASE, 5, TARGETS).values())
    assert (version.rank, version.num_modules) == (5, 8)
    assert version.target_modules == tuple(sorted(TARGETS))
    assert version.weight_bytes == elements * 4 == packed.layout.used_elements * 4
    assert packed.image.shape == (version.num_pages, BASE.page.num_elements)
    assert version.host_bytes == packed.image.nbytes == version.num_pages * BASE.page.num_bytes
    assert version.disk_bytes == (directory / "adapter_model.safetensors").stat().st_size
    assert version.source == str(directory)


def test_bfloat16_rounds_to_the_nearest_even(tmp_path: Path) -> None:
    base = tiny_base(dtype="bfloat16")
    directory = write_good_adapter(tmp_path / "a", base, rank=1, targets=["q_proj"], lora_alpha=1)
    tensors = adapter_tensors(base, 1, ["q_proj"])
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    # Just below, at (twice) and just above the middle between two neighbours.
    bits = np.array([0x3F807FFF, 0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
    tensors[key][0, :4] = bits.view(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    a, _ = unpack(read(directory, base), "model.layers.0.self_attn.q_proj")
    assert [hex(v >> 16) for v in a[0, :4].view(np.uint32)] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81"]


def test_an_overflow_of_the_page_type_is_refused(tmp_path: Path) -> None:
    base = tiny_base(dtype="float16")
    with pytest.raises(AdapterError, match="too large for float16"):
        read(write_good_adapter(tmp_path / "a", base, lora_alpha=1e8), base)


def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    directory = write_good_adapter(tmp_path / "a", BASE)
    size = (directory / "adapter_model.safetensors").stat().st_size
    read(directory, max_bytes=size)
    with pytest.raises(AdapterError, match=f"has {size} bytes, at most {size - 1}"):
        read(directory, max_bytes=size - 1)


def key_of(path: Path, base: BaseShape = BASE) -> str:
    return read(path, base).version.key


def test_equal_weights_are_one_version_whatever_the_files_look_like(tmp_path: Path) -> None:
    plain = write_good_adapter(tmp_path / "plain", BASE)
    tensors = adapter_tensors(BASE)
    dressed = write_good_adapter(tmp_path / "dressed", BASE, lora_dropout=0.5, target_modules=["v_proj", "q_proj"])
    named = {
        key.replace("lora_A.", "lora_A.mine.").replace("lora_B.", "lora_B.mine."): value
        for key, value in reversed(tensors.items())
    }
    save_file(named, dressed / "adapter_model.safetensors", metadata={"format": "pt", "by": "somebody"})
    doubled = write_good_adapter(tmp_path / "pattern", BASE, lora_alpha=1, alpha_pattern={".*": 16})
    assert key_of(plain) == key_of(dressed) == key_of(doubled)


def test_whatever_changes_the_answer_changes_the_version(tmp_path: Path) -> None:
    tensors = adapter_tensors(BASE)
    first = next(iter(tensors))
    nudged = dict(tensors) | {first: np.nextafter(tensors[first], np.float32(9))}
    halves = {key: value.astype(np.float16) for key, value in tensors.items()}
    keys = [key_of(write_good_adapter(tmp_path / "plain", BASE))]
    keys.append(key_of(write_good_adapter(tmp_path / "scale", BASE, lora_alpha=17)))
    keys.append(key_of(write_good_adapter(tmp_path / "seed", BASE, seed=1)))
    for tokens in ([5], [5, 6]):
        keys.append(key_of(write_good_adapter(tmp_path / f"alora-{tokens}", BASE, alora_invocation_tokens=tokens)))
    keys.append(key_of(write_good_adapter(tmp_path / "base", BASE), tiny_base(fingerprint="another")))
    for slug, changed in (("nudged", nudged), ("halves", halves)):
        directory = write_good_adapter(tmp_path / slug, BASE)
        save_file(changed, directory / "adapter_model.safetensors")
        keys.append(key_of(directory))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("wrapper", ["model.language_model.layers", "language_model.model.layers"])
def test_a_multi_modal_checkpoint_of_the_language_model_is_welcome(wrapper: str, tmp_path: Path) -> None:
    directory = write_good_adapter(
        tmp_path / "a", BASE, target_modules=rf".*{wrapper}\.\d+\..*\.(q|v)_proj", alpha_pattern={f"{wrapper}.1.*": 4}
    )
    tensors = {key.replace("model.layers", wrapper): value for key, value in adapter_tensors(BASE).items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    packed = read(directory)
    assert packed.version.num_modules == 4
    _, b = unpack(packed, "model.layers.1.self_attn.q_proj")
    stored = tensors[f"base_model.model.{wrapper}.1.self_attn.q_proj.lora_B.weight"]
    np.testing.assert_allclose(b, stored * np.float32(0.5))
    tower = {f"base_model.model.model.vision_tower.layers.0.q_proj.lora_{s}.weight": np.ones((8, 8)) for s in "AB"}
    save_file(tensors | tower, directory / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"vision_tower.* does not exist"):
        read(directory)


def test_a_module_we_cannot_adapt_is_refused_with_the_reason(tmp_path: Path) -> None:
    base = tiny_base(unsupported=(("model.layers.0.mlp.gate", "a router"),))
    directory = write_good_adapter(tmp_path / "a", base, target_modules=["q_proj", "v_proj", "gate"])
    tensors = adapter_tensors(base)
    router = {f"base_model.model.model.layers.0.mlp.gate.lora_{s}.weight": np.ones((8, 8)) for s in "AB"}
    save_file(tensors | router, directory / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"gate' cannot be adapted: a router"):
        read(directory, base)


def test_the_frozen_matrix_beside_an_adapted_head_is_passed_over(tmp_path: Path) -> None:
    directory = write_good_adapter(tmp_path / "a", BASE, targets=["lm_head"])
    key = key_of(directory)
    copy = {"base_model.model.lm_head.base_layer.weight": np.ones((64, 32), np.float32)}
    save_file(adapter_tensors(BASE, targets=["lm_head"]) | copy, directory / "adapter_model.safetensors")
    assert key_of(directory) == key


def test_inspect_reports_what_is_there_and_whether_it_fits(tmp_path: Path) -> None:
    directory = write_good_adapter(tmp_path / "a", BASE, use_rslora=True)
    alone = inspect_adapter(directory, max_bytes=LIMIT)
    assert (alone.rank, alone.target_modules, alone.fits, alone.version) == (8, ("q_proj", "v_proj"), None, None)
    assert len(alone.modules) == 4 and alone.modules[0].scale == pytest.approx(16 / 8**0.5)
    assert alone.modules[0].num_elements == 8 * (32 + 32) and alone.modules[0].dtype == "F32"
    fitting = inspect_adapter(directory, BASE, max_bytes=LIMIT)
    assert fitting.fits and fitting.version == read(directory).version
    other = inspect_adapter(directory, tiny_base(hidden=64), max_bytes=LIMIT)
    assert other.fits is False and other.problem is not None and "expected [8, 64]" in other.problem
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config(use_dora=True)))
    with pytest.raises(AdapterError, match="no lora_magnitude_vector"):
        inspect_adapter(directory, BASE, max_bytes=LIMIT)
