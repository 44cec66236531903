"""Adapters from a registry in a server: the tokens of the same adapters from disk, and no URL that was not allowed."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
from bad_adapters import tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model
from registry_server import serving_folder

from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.serving.server import BackgroundServer, LoraModule

BASE = tiny_base(vocab=VOCAB_SIZE)


def text_of(http: httpx.Client, name: str) -> str:
    body = {"model": name, "prompt": "hello", "max_tokens": 12, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_adapters_from_a_registry_answer_as_from_disk(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    for seed, name in enumerate(("one", "two")):
        write_good_adapter(tmp_path / "web" / "org" / name, BASE, rank=32, seed=seed)
        shutil.copytree(tmp_path / "web" / "org" / name, tmp_path / "disk" / name)
    with serving_folder(tmp_path / "web") as registry:
        org = f"{registry.url}/org"
        engine = EngineConfig(
            model=ModelConfig(model=str(tmp_path / "model"), served_model_name="base", device="cpu"),
            memory=MemoryConfig(num_pages=128),
            adapters=AdapterConfig(registries=(org,), background_reads=False, cold_start="layers"),
        )
        config = ServerConfig(port=0, in_process=True)
        modules = [LoraModule("one", f"{org}/one"), LoraModule("disk-one", str(tmp_path / "disk" / "one"))]
        modules.append(LoraModule("disk-two", str(tmp_path / "disk" / "two")))
        with (
            BackgroundServer(engine, config, modules) as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            first = http.get("/adapters/one").json()
            assert (first["tier"], first["source"]) == ("disk", f"{org}/one"), "registered by its header"
            loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": f"{org}/two/"})
            assert loaded.status_code == 200, loaded.text
            texts = {name: text_of(http, name) for name in ("base", "one", "two", "disk-one", "disk-two")}
            assert texts["one"] == texts["disk-one"] and texts["two"] == texts["disk-two"]
            assert len(set(texts.values())) == 3

            for url, status in ((f"{registry.url}/elsewhere", 403), (f"{org}/../one", 403), (f"{org}/none", 404)):
                refused = http.post("/v1/load_lora_adapter", json={"lora_name": "no", "lora_path": url})
                assert refused.status_code == status, refused.text
                assert status == 404 or "--lora-dir" not in refused.text


def test_without_the_option_urls_are_refused_by_its_name(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    engine = EngineConfig(
        model=ModelConfig(model=str(tmp_path / "model"), served_model_name="base", device="cpu"),
        memory=MemoryConfig(num_pages=64),
    )
    with (
        BackgroundServer(engine, ServerConfig(port=0, in_process=True)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"lora_name": "no", "lora_path": "https://host.org/a"}
        refused = http.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 403 and "--lora-registry" in refused.text
