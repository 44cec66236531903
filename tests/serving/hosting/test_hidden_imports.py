"""Imports of an engine's process without the packages that it has no use for."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from manylora.serving.hosting.engine.startup import hidden

PROGRAM = """
import sys
from manylora.serving.hosting.engine.service import load_builder
from manylora.serving.hosting.engine.startup import TORCH_BUILDER, UNUSED, hidden
with hidden(*UNUSED):
    load_builder(TORCH_BUILDER)
assert not {name.partition(".")[0] for name in sys.modules} & set(UNUSED)
"""


def test_an_engine_imports_no_unused_package() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_hidden_package_is_there_for_plug_ins_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with hidden("wave", "json"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("wave")
        assert importlib.import_module("json") is json, "it was imported before"
    assert importlib.import_module("wave").Error
