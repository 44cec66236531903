"""Adapters of registries as folders: complete or not there, one for each content."""

from __future__ import annotations

from pathlib import Path

from registry_server import serving_folder

from manylora.execution.storage.registry_folders import copy_adapter


def write(root: Path, weights: bytes) -> None:
    folder = root / "team" / "sql"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (("adapter_config.json", b"{}"), ("adapter_model.safetensors", weights)):
        made = folder / f".{file}"
        made.write_bytes(content)
        made.rename(folder / file)


def test_a_folder_is_made_once_and_another_one_for_other_files(tmp_path: Path) -> None:
    root, parent = tmp_path / "root", tmp_path / "copies"
    write(root, b"one")
    with serving_folder(root) as server:
        first = copy_adapter("team/sql", [f"{server.url}/nothing", server.url], parent)
        assert first is not None and (first / "adapter_model.safetensors").read_bytes() == b"one"
        assert copy_adapter("team/sql", [server.url], parent) == first
        write(root, b"other")
        second = copy_adapter("team/sql", [server.url], parent)
        assert second not in (None, first) and (first / "adapter_model.safetensors").read_bytes() == b"one"
        assert copy_adapter("team/none", [server.url], parent) is None
    assert {path.name for path in parent.iterdir()} == {first.name, second.name}
