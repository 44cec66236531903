"""Servers for the tests: most share one in-process server that recites, some need two processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from reciter import HOLD, engine_config, write_reciter
from serving import Gate, write_tokenizer

from manylora.config import ServerConfig
from manylora.server import BackgroundServer, LoraModule


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session", autouse=True)
def engine_path() -> Iterator[None]:
    """Let engine processes find the builders in ``reciter``."""
    with pytest.MonkeyPatch.context() as patch:
        places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(place for place in places if place))
        yield


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A shut gate, for servers with ``reciter:held_parts``."""
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(HOLD, str(gate.path))
    yield gate
    gate.open()


@pytest.fixture(scope="session")
def lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory the shared server may load adapters from."""
    root = tmp_path_factory.mktemp("adapters").resolve()
    for letter in "mnpq":
        write_reciter(root / letter, letter)
    return root


@pytest.fixture(scope="session")
def server(tokenizer: Path, lora_dir: Path) -> Iterator[BackgroundServer]:
    """A server whose base recites from ``a`` and whose adapters ``m`` and ``n`` from their own letter."""
    config = ServerConfig(port=0, in_process=True, lora_dirs=(str(lora_dir),), max_body_bytes=100_000)
    modules = [LoraModule(letter, str(lora_dir / letter)) for letter in "mn"]
    with BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as running:
        yield running


@pytest.fixture
def client(server: BackgroundServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def http(server: BackgroundServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as opened:
        yield opened
