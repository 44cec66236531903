"""A registered adapter, read again by ranges: the same image, layer after layer, and no layer of other weights."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_adapters import tiny_base, write_good_adapter
from safetensors.numpy import load_file

from manylora.core.adapters import identity, read_layers, weight_file
from manylora.core.adapters import read as read_module
from manylora.core.adapters.folder import LocalFile
from manylora.core.adapters.packed import PackedAdapter, image_of, own_memory
from manylora.core.adapters.read import MAX_MATCHED, MatchedShapes, ReadRules, read_adapter
from manylora.core.adapters.read_layers import LayerReader
from manylora.core.adapters.weight_file import parse_header, read_header_bytes
from manylora.core.errors import AdapterError, AdapterNotFound

BASE = tiny_base(num_layers=5)
TARGETS = ("embed_tokens", "q_proj", "k_proj", "o_proj", "down_proj", "lm_head")
LIMIT = 1 << 26
RULES = ReadRules(base=BASE, max_bytes=LIMIT)


def register(folder: Path, seed: int = 0, rank: int = 8) -> PackedAdapter:
    write_good_adapter(folder, BASE, rank=rank, targets=TARGETS, seed=seed)
    return read_adapter("mine", folder, RULES)


@pytest.fixture(autouse=True, params=[0, read_layers.LEAST_AHEAD_BYTES], ids=["ahead", "in turn"])
def least_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the layers of these small adapters ahead, as those of large ones are, and in turn."""
    monkeypatch.setattr(read_layers, "LEAST_AHEAD_BYTES", request.param)


def read_again(known: PackedAdapter, shapes: MatchedShapes | None = None) -> tuple[np.ndarray, list[int]]:
    with LayerReader(known.version, RULES, shapes=shapes) as reader:
        assert reader.layout == known.layout
        image = image_of(own_memory(known.version.host_bytes), reader.layout, BASE.page)
        full = []
        for num_full in reader.pack(image):
            # Pages that count as full do not change any more.
            np.testing.assert_array_equal(image[:num_full], known.image[:num_full])
            full.append(num_full)
    return image, full


def test_layers_come_one_by_one_and_make_the_same_image(tmp_path: Path) -> None:
    known = register(tmp_path / "a")
    image, full = read_again(known)
    np.testing.assert_array_equal(image, known.image)
    assert all(x <= y for x, y in pairwise(full)) and full[-1] == known.version.num_pages
    assert len(full) == BASE.num_layers + 2 and len(set(full)) > BASE.num_layers


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_type_of_the_image_is_that_of_the_registration(dtype: str, tmp_path: Path) -> None:
    write_good_adapter(tmp_path / "a", BASE, targets=TARGETS)
    known = read_adapter("mine", tmp_path / "a", replace(RULES, dtype=dtype))
    np.testing.assert_array_equal(read_again(known)[0], known.image)


def test_without_digests_no_page_counts_before_all_are_known_to_be_right(tmp_path: Path) -> None:
    known = register(tmp_path / "a")
    bare = replace(known, version=replace(known.version, layer_digests=b""))
    assert read_again(bare)[1] == [known.version.num_pages]
    _touch_last_layer(tmp_path / "a")
    with pytest.raises(AdapterError, match="changed since it was registered"):
        read_again(bare)


def test_a_pickled_file_is_read_whole_and_checked_layer_by_layer(tmp_path: Path) -> None:
    known = register(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    torch.save({k: torch.from_numpy(v) for k, v in tensors.items()}, tmp_path / "a" / "adapter_model.bin")
    image, full = read_again(known)
    np.testing.assert_array_equal(image, known.image)
    assert len(full) == BASE.num_layers + 2


def test_a_layer_that_changed_fails_where_it_is_and_the_layers_before_it_were_right(tmp_path: Path) -> None:
    known = register(tmp_path / "a")
    _touch_last_layer(tmp_path / "a")
    full: list[int] = []
    with LayerReader(known.version, RULES) as reader:
        image = image_of(own_memory(known.version.host_bytes), reader.layout, BASE.page)
        with pytest.raises(AdapterError, match="changed since it was registered"):
            full.extend(reader.pack(image))
    # Embedding and layers 0 to 3; of the page that layers 3 and 4 share, nothing was handed out.
    assert len(full) == 5 and full[-1] == known.layout.groups["model.layers.3.mlp.down_proj"].num_pages_needed - 1
    np.testing.assert_array_equal(image[: full[-1]], known.image[: full[-1]])


def test_a_file_of_another_shape_or_scale_is_another_version(tmp_path: Path) -> None:
    known = register(tmp_path / "a")
    for change in (lambda: register(tmp_path / "a", rank=4), lambda: _rewrite_scale(tmp_path / "a")):
        change()
        with pytest.raises(AdapterError, match="changed since it was registered"):
            read_again(known)


def _rewrite_scale(folder: Path) -> None:
    register(folder)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 8'))


def _touch_last_layer(folder: Path) -> None:
    """Change one number of layer 4 in place."""
    file = folder / "adapter_model.safetensors"
    source = LocalFile("mine", file.open("rb"), file)
    tensors = parse_header("mine", read_header_bytes("mine", source), source.size)
    place = tensors["base_model.model.model.layers.4.self_attn.q_proj.lora_A.weight"].place
    source.close()
    assert place is not None
    content = bytearray(file.read_bytes())
    content[place[0]] ^= 1
    file.write_bytes(content)


def _cut(content: bytes) -> bytes:
    return content[:-100]


def _hole(content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    return content + bytes(8) if length else content


@pytest.mark.parametrize("damage", [_cut, _hole, lambda c: c[:4], lambda c: struct.pack("<Q", 1 << 40) + c[8:]])
def test_a_damaged_file_is_refused_by_its_header(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    known = register(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(AdapterError, match="damaged"):
        read_again(known)


def test_a_file_that_shrinks_while_it_is_read_fails_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = register(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"

    def shrink(version: object) -> None:
        with open(file, "r+b") as opened:
            opened.truncate(file.stat().st_size - 64)

    whole = weight_file.fetch
    monkeypatch.setattr(weight_file, "fetch", lambda source, weights: (shrink(None), whole(source, weights))[1])
    with pytest.raises(AdapterError, match="it ends at byte"):
        read_again(known)


def test_a_shape_is_matched_once_and_every_file_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = read_module.parse_config
    monkeypatch.setattr(read_module, "parse_config", lambda name, config: (parsed.append(name), parse(name, config))[1])
    shapes = MatchedShapes(BASE)
    alike = [register(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for known in alike * 2:
        np.testing.assert_array_equal(read_again(known, shapes)[0], known.image)
    assert len({known.version.key for known in alike}) == 3 and len(parsed) == 1

    _rewrite_scale(tmp_path / "b")
    register(tmp_path / "c", rank=4)
    for known in alike[1:]:
        with pytest.raises(AdapterError, match="changed since it was registered"):
            read_again(known, shapes)
    assert len(parsed) == 3, "another configuration, another header"
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(AdapterError, match="damaged"):
        read_again(alike[0], shapes)


def test_a_file_of_another_version_is_neither_laid_out_nor_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant swaps a registered file for one of a huge rank: the reader gives it no memory."""
    shapes = MatchedShapes(BASE)
    known = register(tmp_path / "a")
    register(tmp_path / "a", rank=64)
    monkeypatch.setattr(read_layers, "layout_of", lambda *_: pytest.fail("it was laid out"))
    with pytest.raises(AdapterError, match="changed since it was registered"):
        read_again(known, shapes)
    monkeypatch.undo()
    register(tmp_path / "a", rank=4)  # of fewer pages
    with pytest.raises(AdapterError, match="changed since it was registered"):
        read_again(known, shapes)
    assert not shapes._known


def test_few_shapes_are_remembered(tmp_path: Path) -> None:
    shapes = MatchedShapes(BASE)
    known = register(tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    for number in range(2 * MAX_MATCHED + 1):
        np.testing.assert_array_equal(read_again(known, shapes)[0], known.image)
        config.write_text(config.read_text() + " ")  # the same configuration, of another spelling
        assert 0 < len(shapes._known) <= MAX_MATCHED, number


def test_files_that_went_away_are_named(tmp_path: Path) -> None:
    known = register(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="no weight file"):
        read_again(known)
    with pytest.raises(AdapterNotFound):
        read_again(replace(known, version=replace(known.version, source=str(tmp_path / "b"))))


def test_a_digest_is_the_same_whatever_is_put_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE, rank=8)
    keys = set()
    for least_bytes in (0, 300, 1000, identity.LEAST_ALONE_BYTES):
        monkeypatch.setattr(identity, "LEAST_ALONE_BYTES", least_bytes)
        version = read_adapter("mine", folder, RULES).version
        keys.add((version.key, version.layer_digests))
    assert len(keys) == 1
