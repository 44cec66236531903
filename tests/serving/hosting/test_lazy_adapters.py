"""Folders of adapters at the start: registered by their headers, read later, and their faults named."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from bad_adapters import adapter_tensors, tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model
from safetensors.numpy import save_file
from serving import wait_for

from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.serving.server import BackgroundServer, LoraModule

BASE = tiny_base(vocab=VOCAB_SIZE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@contextmanager
def serving(model: Path, root: Path, *, background: bool) -> Iterator[httpx.Client]:
    """Serve every folder below ``root``, and allow copies of them to be loaded from beside it."""
    modules = [LoraModule(folder.name, str(folder), is_required=False) for folder in sorted(root.iterdir())]
    engine = EngineConfig(
        model=ModelConfig(model=str(model), served_model_name="base", device="cpu"),
        memory=MemoryConfig(num_pages=128),
        adapters=AdapterConfig(background_reads=background),
    )
    config = ServerConfig(port=0, in_process=True, lora_dirs=(str(root.parent),))
    with (
        BackgroundServer(engine, config, modules) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


def complete(http: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "hello", "max_tokens": 12, "temperature": 0}
    return http.post("/v1/completions", json=body)


def status(http: httpx.Client, name: str) -> dict[str, object]:
    return dict(http.get(f"/adapters/{name}").json())


def write_folders(root: Path) -> None:
    for seed, name in enumerate(("good", "replaced", "rewritten")):
        write_good_adapter(root / name, BASE, seed=seed)
    write_good_adapter(root / "headless", BASE)
    (root / "headless" / "adapter_model.safetensors").write_bytes(b"garbage")
    write_good_adapter(root / "infinite", BASE)
    tensors = adapter_tensors(BASE)
    next(iter(tensors.values()))[0, 0] = np.inf
    save_file(tensors, root / "infinite" / "adapter_model.safetensors")


def test_a_lazy_adapter_answers_as_one_that_was_read_at_once(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write_folders(root)
    write_good_adapter(tmp_path / "eager", BASE, seed=0)
    with serving(model, root, background=False) as http:
        names = [one["id"] for one in http.get("/v1/models").json()["data"]]
        assert names == ["base", "good", "infinite", "replaced", "rewritten"], "but for the broken header"
        lazy = status(http, "good")
        assert (lazy["tier"], lazy["state"], lazy["error"]) == ("disk", "idle", None)
        body = {"lora_name": "eager", "lora_path": str(tmp_path / "eager")}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        answers = {name: complete(http, name).json()["choices"][0]["text"] for name in ("base", "good", "eager")}
        assert answers["good"] == answers["eager"] != answers["base"]
        assert status(http, "good")["version"] == lazy["version"], "the key stays"

        # A load through the API reads everything at once.
        body = {"lora_name": "another", "lora_path": str(root / "infinite")}
        refused = http.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 500 and "not finite" in refused.text

        failed = complete(http, "infinite")
        assert failed.status_code >= 400 and "not finite" in failed.text
        assert status(http, "infinite")["state"] == "failed" and "not finite" in str(status(http, "infinite")["error"])

        write_good_adapter(root / "rewritten", BASE, seed=9)
        changed = complete(http, "rewritten")
        assert changed.status_code >= 400 and "files changed since it was registered" in changed.text

        write_good_adapter(root / "replaced", BASE, seed=0)
        body = {"lora_name": "replaced", "lora_path": str(root / "replaced"), "load_inplace": True}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert complete(http, "replaced").json()["choices"][0]["text"] == answers["good"]
        assert status(http, "replaced")["version"] == status(http, "eager")["version"]


def test_an_idle_server_reads_them_and_finds_their_faults(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write_folders(root)
    with serving(model, root, background=True) as http:
        wait_for(lambda: http.get("/status").json()["engine"]["num_host"] == 3)
        wait_for(lambda: status(http, "infinite")["state"] == "failed")
        rows = {row["name"]: row for row in http.get("/status").json()["adapters"]}
        assert "not finite" in rows["infinite"]["error"] and rows["good"]["tier"] == "host"
        metrics = http.get("/metrics").text
        assert "manylora_adapters_failed 1.0" in metrics and 'adapter_name="' not in metrics
        assert complete(http, "good").status_code == 200
        assert 'adapter_name="good"' in http.get("/metrics").text


def test_a_changed_file_is_refused_by_the_next_engine_too(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    for seed, name in enumerate(("read", "unread", "same")):
        write_good_adapter(root / name, BASE, seed=seed)
    modules = [LoraModule(folder.name, str(folder), is_required=False) for folder in sorted(root.iterdir())]
    engine = EngineConfig(
        model=ModelConfig(model=str(model), served_model_name="base", device="cpu"),
        memory=MemoryConfig(num_pages=128),
        adapters=AdapterConfig(background_reads=False),
    )
    with (
        BackgroundServer(engine, ServerConfig(port=0, lora_dirs=(str(root),)), modules) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        answer = complete(http, "same").json()["choices"][0]["text"]
        assert complete(http, "read").status_code == 200
        for name in ("read", "unread"):
            write_good_adapter(root / name, BASE, seed=9)
        pid = server.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: server.engine_pid != pid and complete(http, "same").status_code == 200)
        assert complete(http, "same").json()["choices"][0]["text"] == answer
        for name in ("read", "unread"):
            changed = complete(http, name)
            assert changed.status_code >= 400 and "files changed since it was registered" in changed.text
