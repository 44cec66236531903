"""Adapters checked by configuration and header: the same versions and refusals as when they are read whole."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_adapters import BAD_ADAPTERS, BadAdapter, adapter_tensors, tiny_base, write_good_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file

from manylora.core.adapters import read as read_module
from manylora.core.adapters import weight_file
from manylora.core.adapters.hash_cache import KnownContent
from manylora.core.adapters.identity import is_provisional, provisional_key
from manylora.core.adapters.packed import image_of, own_memory
from manylora.core.adapters.read import HeaderReader, ReadRules, read_adapter
from manylora.core.adapters.read_layers import LayerReader
from manylora.core.adapters.sources import open_folder
from manylora.core.adapters.weight_file import fetch, parse_header
from manylora.core.errors import AdapterError

BASE = tiny_base()
LIMIT = 64 * 1024 * 1024
RULES = ReadRules(base=BASE, max_bytes=LIMIT)
AUTO = replace(RULES, dtype="auto")


def reader(
    known: Callable[[str], KnownContent | None] = lambda file_key: None, rules: ReadRules = RULES, **changes: object
) -> HeaderReader:
    return HeaderReader(replace(rules, **changes), known)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", BAD_ADAPTERS, ids=lambda bad: bad.slug)
def test_a_bad_adapter_is_refused_by_its_header(bad: BadAdapter, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    directory.mkdir()
    bad.build(directory, BASE)
    try:
        reader().read("mine", directory)
    except AdapterError as error:
        assert type(error) is bad.error and error.adapter == "mine"
        assert all(word in error.reason for word in bad.words)
        assert len(str(error)) < 600 and str(tmp_path) not in error.reason
        assert not (directory / "executed").exists()
    else:
        assert "finite" in " ".join(bad.words), "only a fault of the numbers may pass"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [4, 16, 15])
def test_the_version_is_that_of_the_weights_but_for_its_key(dtype: torch.dtype, alpha: int, tmp_path: Path) -> None:
    directory = write_good_adapter(
        tmp_path / "a", BASE, lora_alpha=alpha, alora_invocation_tokens=[5, 6] * (alpha == 4)
    )
    tensors = {key: torch.from_numpy(value).to(dtype) for key, value in adapter_tensors(BASE).items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    version = reader(dtype="auto").read("mine", directory)
    file_key, _ = AUTO.file_key_of(open_folder("mine", directory))
    assert version.key == provisional_key(file_key) and is_provisional(version.key)
    chosen = read_adapter("mine", directory, AUTO).version
    assert not is_provisional(chosen.key)
    packed = read_adapter("mine", directory, replace(RULES, dtype=version.dtype)).version
    assert version == replace(packed, key=version.key, layer_digests=b"", is_whole=True)
    assert version.dtype in ("float32", chosen.dtype), "16 bits only where they are exact"
    with LayerReader(version, AUTO) as layers:
        image = image_of(own_memory(version.host_bytes), layers.layout, BASE.page)
        assert list(layers.pack(image)) == [version.num_pages], "no page before all is known"
    assert layers.first_content == (chosen.key, chosen.dtype, chosen.layer_digests)


def test_known_content_gives_the_version_that_reading_gives(tmp_path: Path) -> None:
    directory = write_good_adapter(tmp_path / "a", BASE)
    exact = {key: np.round(value * 8) / 8 for key, value in adapter_tensors(BASE).items()}
    save_file({key: torch.from_numpy(value) for key, value in exact.items()}, directory / "adapter_model.safetensors")
    read = read_adapter("mine", directory, AUTO)
    version = read.version
    assert version.dtype == "bfloat16", "stored wider than its numbers are"
    content = KnownContent(version.key, version.dtype, version.layer_digests)
    known = {AUTO.file_key_of(open_folder("mine", directory))[0]: content}
    assert reader(dtype="auto", known=known.get).read("mine", directory) == version


def test_every_change_of_the_files_changes_the_key(tmp_path: Path) -> None:
    directory = write_good_adapter(tmp_path / "a", BASE)
    weights = directory / "adapter_model.safetensors"
    os.utime(weights, (1, 1))  # so that no write falls into the same tick of the file system's clock
    keys = [reader().read("mine", directory).key]
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)
    keys.append(reader().read("mine", directory).key)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 17}))
    keys.append(reader().read("mine", directory).key)
    keys.append(reader(base=tiny_base(fingerprint="other")).read("mine", directory).key)
    assert len(set(keys)) == 4


def test_adapters_of_one_shape_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(name: str, header: bytes, num_bytes: int) -> object:
        parsed.append(name)
        return parse_header(name, header, num_bytes)

    monkeypatch.setattr(read_module, "parse_header", parse)
    headers = reader()
    for index, targets in enumerate([["q_proj", "v_proj"], ["v_proj", "q_proj"]] * 5):
        directory = write_good_adapter(tmp_path / str(index), BASE, seed=index, target_modules=targets)
        headers.read(str(index), directory)
    assert parsed == ["0"]
    headers.read("wide", write_good_adapter(tmp_path / "wide", BASE, rank=9))
    assert parsed == ["0", "wide"]


def test_the_shapes_that_are_kept_hold_nothing_that_a_tenant_wrote(tmp_path: Path) -> None:
    directory = write_good_adapter(tmp_path / "a", BASE)
    config = json.loads((directory / "adapter_config.json").read_text())
    headers = reader()
    headers.read("a", directory)
    tracemalloc.start()
    try:
        for index in range(20):
            written = json.dumps({**config, "auto_mapping": {"x": str(index) + "x" * 500_000}})
            (directory / "adapter_config.json").write_text(written)
            headers.read("a", directory)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def rewrite(directory: Path) -> None:
    content = (directory / "adapter_model.safetensors").read_bytes()
    (directory / "adapter_model.safetensors").write_bytes(content)


def replace_by_a_rename(directory: Path) -> None:
    save_file({"x": torch.zeros(1)}, directory / "new")
    (directory / "new").rename(directory / "adapter_model.safetensors")


def rewrite_the_configuration(directory: Path) -> None:
    config = directory / "adapter_config.json"
    config.write_text(config.read_text() + "\n")


def remove(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize("change", [rewrite, replace_by_a_rename, rewrite_the_configuration, remove])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_change_at_any_moment_of_the_first_read_is_noticed(
    change: Callable[[Path], None], layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 is before the files are opened."""
    directory = write_good_adapter(tmp_path / "a", BASE)
    os.utime(directory / "adapter_model.safetensors", (1, 1))
    version = reader().read("mine", directory)
    num_fetched = 0

    def fetch_and_change(*arguments: Any) -> Any:
        nonlocal num_fetched
        num_fetched += 1
        if num_fetched == layer:
            change(directory)
        return fetch(*arguments)

    monkeypatch.setattr(weight_file, "fetch", fetch_and_change)
    if not layer:
        change(directory)
    with (
        pytest.raises(AdapterError, match=r"changed since it was registered|has no weight file"),
        LayerReader(version, RULES) as layers,
    ):
        list(layers.pack(image_of(own_memory(version.host_bytes), layers.layout, BASE.page)))
    assert layer == 0 or layers.first_content is None


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
}
VALUES = st.sampled_from([0, 1, 2, 3, 23, 24, 25, 32, 33, 34, -1, 2**40, 1.5, "F32", "F16", "X", None, [], {}, True])


@settings(max_examples=300)
@given(
    key=st.sampled_from(["__metadata__", "a", "b", "c"]),
    field=st.sampled_from(["dtype", "shape", "data_offsets", "format", "more"]),
    place=st.none() | st.integers(0, 1),
    value=VALUES,
    num_more=st.sampled_from([0, 0, 0, 1, -1]),
)
def test_a_header_is_taken_if_and_only_if_safetensors_takes_it(key, field, place, value, num_more) -> None:
    header = json.loads(json.dumps(HEADER))
    old = header[key].get(field)
    if place is not None and isinstance(old, list) and len(old) > place:
        old[place] = value
    else:
        header[key][field] = value
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(34 + num_more)
    try:
        expected = {name: tuple(tensor["shape"]) for name, tensor in deserialize(content)}
    except SafetensorError:
        expected = None
    try:
        found = {name: tensor.shape for name, tensor in parse_header("mine", text, len(content)).items()}
    except AdapterError:
        found = None
    assert found == expected, (text, num_more)
