"""Names of bases: of one model, and of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manylora.core.adapters.request_files import is_same_base, names_of_base


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "/models/llama-3.1-8b/",
        "unsloth/Llama-3_1-8B",
        "/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249",
    ],
)
def test_names_of_one_model(name: str) -> None:
    assert is_same_base("meta-llama/Llama-3.1-8B", [name])


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "Llama-3-8B", "/models/base", ""])
def test_names_of_others(name: str) -> None:
    assert not is_same_base("meta-llama/Llama-3.1-8B", [name])


def test_a_configuration_keeps_a_name(tmp_path: Path) -> None:
    assert names_of_base(str(tmp_path), "served") == (str(tmp_path), "served")
    for content in ("{", "[]", '{"_name_or_path": 3}'):
        (tmp_path / "config.json").write_text(content)
        assert names_of_base(str(tmp_path)) == (str(tmp_path),)
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "org/name"}))
    assert is_same_base("Name", names_of_base(str(tmp_path)))
