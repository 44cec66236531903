"""Run the program as the shell would, and keep what `manylora serve` would have served."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import manylora.cli.app
import manylora.serving.server
from manylora.cli.app import main, make_app
from manylora.core.config import EngineConfig, ServerConfig
from manylora.serving.hosting.engine.startup import prestart_engine

app = make_app()


@dataclass
class Served:
    engine: EngineConfig
    server: ServerConfig
    adapters: dict[str, str]
    required: set[str]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """Instead of serving, keep what was to be served."""
    calls: list[Served] = []

    def run(engine: EngineConfig, server: ServerConfig, modules: Sequence[Any], *, builder: str | None) -> int:
        assert builder is None
        adapters = {module.name: module.path for module in modules}
        required = {module.name for module in modules if module.is_required}
        calls.append(Served(engine, server, adapters, required))
        return 0

    monkeypatch.setitem(vars(manylora.serving.server), "run", run)
    return calls


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the program as the shell would; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["manylora", *args])
    if manylora.cli.app.prestart_engine is prestart_engine:  # no process beside the tests, unless one is about it
        monkeypatch.setattr(manylora.cli.app, "prestart_engine", lambda builder: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code
