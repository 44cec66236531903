"""The type an adapter is kept in: exact by default, narrower when asked, half the pages where it is half as wide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bad_adapters import adapter_config, adapter_tensors, tiny_base, write_good_adapter
from safetensors.torch import save_file
from unpacked import unpack

from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.config import AdapterConfig
from manylora.core.errors import AdapterError, ConfigError

BASE = tiny_base()
TARGETS = ("q_proj", "v_proj", "down_proj", "embed_tokens")
MODULE = "model.layers.0.self_attn.q_proj"


def read(path: Path, dtype: str | None) -> PackedAdapter:
    return read_adapter("mine", path, ReadRules(base=BASE, max_bytes=1 << 26, dtype=dtype))


def write(path: Path, dtype: torch.dtype, **settings: object) -> Path:
    """Save an adapter whose numbers are ``dtype``'s."""
    folder = write_good_adapter(path, BASE, rank=8, targets=TARGETS, **settings)
    tensors = {key: torch.from_numpy(value).to(dtype) for key, value in adapter_tensors(BASE, 8, TARGETS).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("stored", "settings", "kept"),
    [
        (torch.bfloat16, {}, "bfloat16"),
        (torch.float16, {}, "float16"),
        (torch.float32, {}, "float32"),
        (torch.bfloat16, {"use_rslora": True, "lora_alpha": 8}, "float32"),
    ],
    ids=["bfloat16", "float16", "float32", "a-scale-that-rounds"],
)
def test_auto_is_the_narrowest_that_is_exact(
    stored: torch.dtype, settings: dict[str, object], kept: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", stored, **settings)
    packed, exact = read(folder, "auto"), read(folder, "float32")
    assert packed.layout.dtype == kept
    for found, expected in zip(unpack(packed, MODULE), unpack(exact, MODULE), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert packed.version.key == exact.version.key


def test_sixteen_bits_take_half_the_pages(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", torch.bfloat16)
    wide, narrow = read(folder, "float32"), read(folder, "auto")
    assert narrow.version.weight_bytes * 2 == wide.version.weight_bytes
    assert narrow.version.num_pages <= wide.version.num_pages // 2 + 1
    assert narrow.version.host_bytes == narrow.image.nbytes == narrow.version.num_pages * BASE.page.num_bytes


def test_a_file_of_float32_that_holds_bfloat16_is_narrow_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", torch.bfloat16)
    tensors = {key: torch.from_numpy(v).bfloat16().float() for key, v in adapter_tensors(BASE, 8, TARGETS).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert read(folder, "auto").layout.dtype == "bfloat16"


def test_who_names_a_type_gets_it_rounded(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", torch.float32)
    packed = read(folder, "bfloat16")
    assert packed.layout.dtype == "bfloat16"
    for found, exact in zip(unpack(packed, MODULE), unpack(read(folder, "float32"), MODULE), strict=True):
        np.testing.assert_allclose(found, exact, rtol=2.0**-8)
    assert read(folder, None).layout.dtype == BASE.page.dtype


def test_what_float16_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", torch.float32, **adapter_config(8, TARGETS, lora_alpha=1e8))
    with pytest.raises(AdapterError, match="too large for float16"):
        read(folder, "float16")
    assert read(folder, "auto").layout.dtype == "float32"


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter_dtype"):
        AdapterConfig(adapter_dtype="int4")
