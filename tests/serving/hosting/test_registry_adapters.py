"""Adapters from a registry in a server: the tokens of the same adapters from disk, and no URL that was not allowed."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from pathlib import Path

import httpx
import pytest
from bad_adapters import tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model
from registry_server import serving_folder
from registry_stubs import HUB_TOKEN, HubServer

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


def test_adapters_of_a_hub_are_loaded_when_requests_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    write_model(tmp_path / "model")
    for seed, name in enumerate(("one", "two", "broken")):
        write_good_adapter(tmp_path / "web" / "org" / name, BASE, rank=32, seed=seed)
    (tmp_path / "web" / "org" / "broken" / "adapter_config.json").write_text("[]")
    with serving_folder(tmp_path / "web", HubServer) as hub:
        assert isinstance(hub, HubServer)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
        engine = EngineConfig(
            model=ModelConfig(model=str(tmp_path / "model"), served_model_name="base", device="cpu"),
            memory=MemoryConfig(num_pages=128),
            adapters=AdapterConfig(registries=("hf://org",), background_reads=False),
            cache_dir=str(tmp_path / "cache"),
        )
        config = ServerConfig(port=0, in_process=True, lora_on_demand=True)
        with (
            BackgroundServer(engine, config, [LoraModule("one", "hf://org/one")]) as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            hub.commits["main"] = "b" * 40
            assert http.get("/adapters/one").json()["source"] == f"hf://org/one@{'a' * 40}"
            text_of(http, "one")

            hub.asked.clear()
            answers = asyncio.run(answers_of(server.url, "two", 100))
            assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
            assert http.get("/adapters/two").json()["source"] == f"hf://org/two@{'b' * 40}"
            assert max(Counter(hub.asked).values()) == 1, "each range of a file came once"

            hub.heads.clear()
            for name, status in (("none", 404), ("none", 404), ("broken", 400), ("broken", 400)):
                refused = http.post("/v1/completions", json={"model": name, "prompt": "hello"})
                assert refused.status_code == status and HUB_TOKEN not in refused.text, refused.text
            assert sum("/none/" in head for head in hub.heads) == 1
            hub.heads.clear()
            for name in ("hf://org/two", f"{hub.url}/two", "../org/two", "two@main", "x/../two", "base"):
                status = http.post("/v1/completions", json={"model": name, "prompt": "hello"}).status_code
                assert status == (200 if name == "base" else 404) and not hub.heads
            for route in ("/status", "/adapters", "/metrics", "/v1/models", "/server_info"):
                assert HUB_TOKEN not in http.get(route).text
    assert HUB_TOKEN not in caplog.text


async def answers_of(url: str, model: str, number: int) -> list[httpx.Response]:
    """Ask for a model many times at once."""
    body = {"model": model, "prompt": "hello", "max_tokens": 2, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=number)) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(number)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers][:3]
    return answers
