"""What keeps a server from starting: an adapter asked for by name; not one that was merely found in a folder."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from bad_adapters import tiny_base, write_good_adapter
from reciter import engine_config

from manylora import Engine
from manylora.core.config import EngineConfig, ModelConfig, ServerConfig
from manylora.core.errors import AdapterError, ConfigError
from manylora.serving.hosting.engine import startup
from manylora.serving.hosting.engine.process import EXIT_ORPHANED
from manylora.serving.hosting.engine.service import load_builder
from manylora.serving.hosting.engine.startup import prestart_engine, take_prestarted
from manylora.serving.hosting.protocol import EngineSpec
from manylora.serving.server import BackgroundServer, LoraModule

CONFIG = ServerConfig(port=0, in_process=True)
BUILDER = "serving:packing_parts"


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(write_good_adapter(tmp_path / "good", tiny_base()))


@pytest.fixture
def broken(tmp_path: Path) -> str:
    folder = write_good_adapter(tmp_path / "broken", tiny_base())
    (folder / "adapter_model.safetensors").write_bytes(b"garbage")
    return str(folder)


def test_a_start_that_fails_while_the_engine_is_built_ends(tmp_path: Path) -> None:
    """The engine's thread is told to stop before it has a loop that could be told."""
    server = BackgroundServer(engine_config(tmp_path / "no tokenizer"), CONFIG, builder="reciter:late_parts")
    with pytest.raises(ConfigError, match="no tokenizer"), server:
        pytest.fail("it started")
    with pytest.raises(ConfigError):
        server.wait(60.0)


@pytest.mark.parametrize("builder", ["x", "no.such:thing", "os:nothing", "manylora.core.types:__name__"])
def test_a_builder_that_is_none_is_named(builder: str) -> None:
    with pytest.raises(ConfigError, match=f"^Got builder = {builder!r}, "):
        load_builder(builder)


def test_a_broken_adapter_that_was_found_is_left_out(tokenizer: Path, good: str, broken: str) -> None:
    modules = [LoraModule("broken", broken, is_required=False), LoraModule("good", good, is_required=False)]
    with BackgroundServer(engine_config(tokenizer), CONFIG, modules, builder=BUILDER) as server:
        models = httpx.get(server.url + "/v1/models", timeout=30).json()["data"]
        assert [model["id"] for model in models][1:] == ["good"]
        body = {"model": "broken", "prompt": "x", "max_tokens": 1}
        assert httpx.post(server.url + "/v1/completions", json=body, timeout=30).status_code == 404


def test_a_broken_adapter_that_was_named_is_an_error(tokenizer: Path, good: str, broken: str) -> None:
    modules = [LoraModule("good", good, is_required=False), LoraModule("broken", broken)]
    with (
        pytest.raises(AdapterError, match=r"'broken': .*safetensors"),
        BackgroundServer(engine_config(tokenizer), CONFIG, modules, builder=BUILDER),
    ):
        pytest.fail("it started")


def test_named_adapters_are_checked_before_the_model_is_loaded(tmp_path: Path, broken: str) -> None:
    model = str(tmp_path / "no model")
    engine = EngineConfig(model=ModelConfig(model=model))
    for path, words in ((broken, r"'named': .*safetensors"), (str(tmp_path / "nowhere"), "'named'")):
        with (
            pytest.raises(AdapterError, match=words),
            BackgroundServer(engine, CONFIG, [LoraModule("named", path)]),
        ):
            pytest.fail("it started")
        with pytest.raises(AdapterError, match=words):
            Engine(model, adapters={"named": path})


def test_an_engine_process_can_wait_for_its_set_up(tokenizer: Path) -> None:
    prestart_engine("reciter:reciter_parts")
    (process,) = startup._waiting.values()
    config = ServerConfig(port=0)
    with BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as server:
        assert server.engine_pid == process.pid
        assert httpx.get(server.url + "/health").status_code == 200
        assert not startup._waiting
    prestart_engine("reciter:reciter_parts")
    ((builder, orphan),) = startup._waiting.items()
    spec = EngineSpec(config=engine_config(tokenizer), served_name="base", builder=builder)
    assert take_prestarted(msgspec.structs.replace(spec, num_threads=2)) is None
    assert take_prestarted(msgspec.structs.replace(spec, builder="another:one")) is None
    assert orphan.stdin is not None
    orphan.stdin.close()  # as at the end of a command that failed
    assert orphan.wait(60) == EXIT_ORPHANED
    assert take_prestarted(spec) is None
