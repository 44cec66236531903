"""What holds for every test.

Triton decides when it is imported whether to compile kernels or to run them in Python: without a GPU, the latter.

Torch has one thread, on whatever machine: models this small only lose by a second one. Tests of kernels whose threads
share work ask for two (``two_threads``).

Memory that nobody has written holds NaN, or the largest integer: what reads it is seen at once, not on another day.

Hypothesis draws the same examples every time, and a slow machine is no failure: a red test is the change's doing. To
search further, draw new ones: ``pytest --hypothesis-profile=search tests/core``.

Most tests of HTTP share one server in this process that recites; some need two processes.

The process that hands tests out to others runs none, and imports no torch, no client and no server.

Garbage collection visits nothing of what collecting the tests imports and makes: millions of objects, which stay.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import httpx
    import openai
    from serving import Gate

    from manylora.serving.server import BackgroundServer

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    if not session.config.pluginmanager.hasplugin("dsession"):  # else others collect
        prepare()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def prepare() -> None:
    """Set torch and Triton up, before any module of tests imports them."""
    import torch
    from triton_interpreter import speed_up

    if not torch.cuda.is_available() and find_spec("triton") is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        speed_up()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands print their tables at full width, on whatever terminal."""
    from rich.console import Console, ConsoleDimensions

    monkeypatch.setattr(Console, "size", property(lambda console: ConsoleDimensions(400, 50)))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch have two threads, and all that runs on them."""
    import torch

    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from serving import write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session", autouse=True)
def engine_path() -> Iterator[None]:
    """Let engine processes find the builders in ``reciter``."""
    with pytest.MonkeyPatch.context() as patch:
        places = [str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(place for place in places if place))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have clients trust one authority: each reads all of the system's when it is made, in 30 ms.

    Tests of TLS name their own, and no test calls a server outside.
    """
    import certifi

    folder = tmp_path_factory.mktemp("authorities")
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    (folder / "one.pem").write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(folder))
        patch.setenv("SSL_CERT_FILE", str(folder / "one.pem"))
        yield


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A shut gate, for servers with ``reciter:held_parts``."""
    from reciter import HOLD
    from serving import Gate

    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(HOLD, str(gate.path))
    yield gate
    gate.open()


@pytest.fixture(scope="session")
def lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory the shared server may load adapters from."""
    from reciter import write_reciter

    root = tmp_path_factory.mktemp("adapters").resolve()
    for letter in "mnpq":
        write_reciter(root / letter, letter)
    return root


@pytest.fixture(scope="session")
def server(tokenizer: Path, lora_dir: Path) -> Iterator[BackgroundServer]:
    """A server whose base recites from ``a`` and whose adapters ``m`` and ``n`` from their own letter."""
    from reciter import engine_config

    from manylora.core.config import ServerConfig, WebConfig
    from manylora.serving.server import BackgroundServer, LoraModule

    config = ServerConfig(
        port=0,
        in_process=True,
        lora_dirs=(str(lora_dir),),
        max_body_bytes=100_000,
        web=WebConfig(prompt_tokens_details=True),
    )
    modules = [LoraModule(letter, str(lora_dir / letter)) for letter in "mn"]
    with BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as running:
        yield running


@pytest.fixture
def client(server: BackgroundServer) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def http(server: BackgroundServer) -> Iterator[httpx.Client]:
    import httpx

    with httpx.Client(base_url=server.url, timeout=30) as opened:
        yield opened
