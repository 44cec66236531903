"""Bases in files as they are kept: found by the next start, for the same checkpoint and precision alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_base_weights import FAMILIES, logits, save

from manylora.core.config import ModelConfig
from manylora.execution.model import packed_cache
from manylora.execution.model.base_weights import BaseWeights
from manylora.execution.model.freeze import load_weights

pytest.importorskip("numba")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint that was written a while ago."""
    save(FAMILIES["llama"], tmp_path / "base")
    age(tmp_path / "base")
    return tmp_path


def age(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100.0))


def start(folder: Path, base_dtype: str = "int8") -> BaseWeights:
    """Load the weights, and wait until they are in the cache."""
    config = ModelConfig(model=str(folder / "base"), device="cpu", base_dtype=base_dtype)
    _, weights = load_weights(config, cache=folder / "cache")
    for thread in threading.enumerate():
        if thread.name == packed_cache.THREAD_NAME:
            thread.join(30)
    return weights


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").glob("*")} if (folder / "cache").is_dir() else set()


def is_cached(weights: BaseWeights, folder: Path) -> bool:
    assert weights.memory is not None and weights.memory.fd is not None
    return os.readlink(f"/proc/self/fd/{weights.memory.fd}").startswith(str(folder / "cache"))


@pytest.mark.parametrize("base_dtype", ["int8", "int4", "bfloat16"])
def test_the_next_start_maps_the_same_weights(folder: Path, base_dtype: str) -> None:
    first, second = start(folder, base_dtype), start(folder, base_dtype)
    assert (is_cached(first, folder), is_cached(second, folder)) == (False, True)
    assert first.manifest == second.manifest
    assert {name.rpartition(".")[2] for name in files(folder)} == {"weights", "table"}
    model = ModelConfig(model=str(folder / "base"), device="cpu", base_dtype=base_dtype)
    assert torch.equal(logits(model, first), logits(model, second))


def test_float32_is_not_kept(folder: Path) -> None:
    start(folder, "float32")
    assert not files(folder)


def test_each_precision_has_its_own(folder: Path) -> None:
    start(folder, "int8")
    assert not is_cached(start(folder, "int4"), folder)
    assert is_cached(start(folder, "int8"), folder)
    assert len(files(folder)) == 4


def test_a_changed_checkpoint_is_read_again_and_replaces_the_file(folder: Path) -> None:
    start(folder)
    before = files(folder)
    path = folder / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, path, {"format": "pt"})
    age(folder / "base")
    assert not is_cached(start(folder), folder)
    assert len(files(folder)) == 2
    assert not files(folder) & before
    norm = start(folder).tensors["model.norm.weight"]
    assert isinstance(norm, torch.Tensor)
    torch.testing.assert_close(norm, tensors["model.norm.weight"])


def test_files_that_were_just_written_are_not_trusted(tmp_path: Path) -> None:
    save(FAMILIES["llama"], tmp_path / "base")
    start(tmp_path)
    assert not files(tmp_path)


@pytest.mark.parametrize("kind", ["table", "weights"])
@pytest.mark.parametrize("size", [0, 100])
def test_damaged_files_cost_a_read(folder: Path, kind: str, size: int) -> None:
    start(folder)
    (path,) = (folder / "cache").glob(f"*.{kind}")
    os.truncate(path, size)
    assert not is_cached(start(folder), folder)
    assert is_cached(start(folder), folder)


def test_a_full_disk_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MOST_OF_FREE", 0.0)
    start(folder)
    assert not files(folder)


def test_a_folder_that_cannot_be_made_is_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "cache").write_text("a file")
    start(folder)
    assert "base_not_cached" in caplog.text


def test_weights_say_how_they_are_kept_and_multiplied(folder: Path) -> None:
    found = start(folder, "int4").describe()
    assert found[0].startswith("int4, a scale for 32 inputs, activations in ")
    assert any(line.startswith("int8, a scale for ") for line in found)  # the head
    assert found[-1].startswith("float32: ")  # norms
    assert len(found) == len({line.partition(":")[0] for line in found})
