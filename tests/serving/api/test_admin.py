"""Adapters at run time, with vLLM's texts and codes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from reciter import engine_config, write_reciter

from manylora.core.config import ServerConfig
from manylora.core.errors import AdapterError, ConfigError
from manylora.serving.server import BackgroundServer, LoraModule


@pytest.fixture
def loaded(http: httpx.Client, lora_dir: Path) -> Iterator[str]:
    """The adapter ``p``, for one test."""
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "p", "lora_path": str(lora_dir / "p")})
    assert answer.status_code == 200, answer.text
    yield "p"
    http.delete("/adapters/p")


def say(http: httpx.Client, model: str) -> str:
    answer = http.post("/v1/completions", json={"model": model, "prompt": "say", "max_tokens": 3})
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.json()["error"]["type"]


def test_load_and_unload_answer_as_vllm_does(http: httpx.Client, lora_dir: Path) -> None:
    load = {"lora_name": "p", "lora_path": str(lora_dir / "p")}
    assert say(http, "p") == "NotFoundError"
    answer = http.post("/v1/load_lora_adapter", json=load)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'p' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    assert say(http, "p") == "pqr"
    again = http.post("/v1/load_lora_adapter", json=load)
    assert again.status_code == 400
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert "has already been loaded" in again.json()["error"]["message"]
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "p"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'p' removed successfully.")
    assert say(http, "p") == "NotFoundError"
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "p"})
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")


def test_sagemaker_aliases(http: httpx.Client, lora_dir: Path) -> None:
    answer = http.post("/adapters", json={"name": "a/q", "src": str(lora_dir / "q")})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a/q' added successfully.")
    assert say(http, "a/q") == "qrs"
    assert http.get("/adapters/a/q").json()["name"] == "a/q"
    answer = http.delete("/adapters/a/q")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a/q' removed successfully.")
    assert http.delete("/adapters/a/q").status_code == 404


def test_the_list_tells_tier_version_and_use(http: httpx.Client, loaded: str) -> None:
    before = http.get("/adapters/p").json()
    assert (before["tier"], before["generation"], before["num_requests"]) == ("host", 1, 0)
    say(http, "p")
    after = http.get("/adapters/p").json()
    assert (after["tier"], after["num_requests"], after["state"]) == ("device", 1, "idle")
    assert after["rank"] == 8
    names = [adapter["name"] for adapter in http.get("/adapters").json()["data"]]
    assert names == sorted(names)
    assert {"m", "n", "p"} <= set(names)
    assert http.get("/adapters/nobody").status_code == 404


def test_warm_and_pin(http: httpx.Client, loaded: str) -> None:
    assert http.post("/adapters/p/warm").json()["state"] in ("loading", "idle")
    for _ in range(100):
        if http.get("/adapters/p").json()["tier"] == "device":
            break
    else:
        pytest.fail("p was not copied to the device")
    assert http.post("/adapters/p/pin").json()["pinned"] is True
    assert http.get("/adapters/p").json()["pinned"] is True
    assert http.post("/adapters/p/unpin").json()["pinned"] is False
    assert http.post("/adapters/nobody/pin").status_code == 404
    assert http.post("/adapters/nobody/warm").status_code == 404


def test_replacing_in_place_is_a_new_version(http: httpx.Client, loaded: str, lora_dir: Path) -> None:
    http.post("/adapters/p/pin")
    version = http.get("/adapters/p").json()["version"]
    body = {"lora_name": "p", "lora_path": str(lora_dir / "q"), "load_inplace": True}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    status = http.get("/adapters/p").json()
    assert (status["generation"], status["pinned"]) == (2, True)
    assert status["version"] != version
    assert say(http, "p") == "qrs"


def test_replacing_in_place_under_load(server: BackgroundServer, loaded: str, lora_dir: Path) -> None:
    """Two hundred requests in flight: each answer wholly old or wholly new, by order of arrival."""

    async def scenario() -> tuple[list[str], list[str]]:
        answering = asyncio.Event()
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits()) as client:

            async def ask() -> str:
                body = {"model": "p", "prompt": "say", "max_tokens": 60, "stream": True}
                text = ""
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    assert answer.status_code == 200
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            answering.set()
                            text += json.loads(line[6:])["choices"][0]["text"]
                return text

            early = [asyncio.create_task(ask()) for _ in range(100)]
            await answering.wait()
            body = {"lora_name": "p", "lora_path": str(lora_dir / "q"), "load_inplace": True}
            replaced = asyncio.create_task(client.post("/v1/load_lora_adapter", json=body))
            between = [asyncio.create_task(ask()) for _ in range(50)]
            assert (await replaced).status_code == 200
            late = [asyncio.create_task(ask()) for _ in range(50)]
            return [*await asyncio.gather(*early), *await asyncio.gather(*between)], await asyncio.gather(*late)

    before, late = asyncio.run(scenario())
    alphabet = "abcdefghijklmnopqrstuvwxyz" * 5
    old, new = (alphabet[alphabet.index(letter) :][:60] for letter in "pq")
    assert set(before) <= {old, new}
    assert old in before
    assert set(late) == {new}


def test_paths_outside_the_directories_are_refused(http: httpx.Client, lora_dir: Path, tmp_path: Path) -> None:
    outside = write_reciter(tmp_path / "outside", "x")
    (lora_dir / "link").symlink_to(outside)
    try:
        for path in (str(outside), str(lora_dir / "link"), f"{lora_dir}/../{outside}", "/etc"):
            answer = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
            assert answer.status_code in (403, 404), path
            assert say(http, "x") == "NotFoundError"
    finally:
        (lora_dir / "link").unlink()
    missing = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(lora_dir / "none")})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")


def test_a_broken_adapter_is_vllms_500_and_harms_nobody(http: httpx.Client, lora_dir: Path) -> None:
    broken = lora_dir / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_text("{}")
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(broken)})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert "names no letter" in answer.json()["error"]["message"]
    (broken / "adapter_config.json").write_text("not json")
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(broken)})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert say(http, "m") == "mno"


def test_without_directories_nothing_is_loaded_at_run_time(tokenizer: Path, lora_dir: Path) -> None:
    config = ServerConfig(port=0, in_process=True)
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": "p", "lora_path": str(lora_dir / "p")})
        assert answer.status_code == 403
        assert "--lora-dir" in answer.json()["error"]["message"]


def test_an_adapter_of_the_start_may_be_loaded_again(tokenizer: Path, lora_dir: Path) -> None:
    config = ServerConfig(port=0, in_process=True)
    modules = [LoraModule("p", str(lora_dir / "p"))]
    with (
        BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.delete("/adapters/p").status_code == 200
        body = {"lora_name": "p", "lora_path": str(lora_dir / "p")}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        body = {"lora_name": "q", "lora_path": str(lora_dir / "q")}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 403


@pytest.mark.parametrize(
    ("modules", "error", "words"),
    [
        ([("bad", "missing")], AdapterError, "bad"),
        ([("m", "m"), ("m", "n")], ConfigError, "'m' twice"),
        ([("base", "m")], ConfigError, "'base' twice"),
    ],
)
def test_a_bad_adapter_at_start_is_an_error_that_names_it(
    tokenizer: Path, lora_dir: Path, modules: list[tuple[str, str]], error: type[Exception], words: str
) -> None:
    given = [LoraModule(name, str(lora_dir / path)) for name, path in modules]
    server = BackgroundServer(
        engine_config(tokenizer), ServerConfig(port=0, in_process=True), given, builder="reciter:reciter_parts"
    )
    with pytest.raises(error, match=words), server:
        pytest.fail("it started")


def test_a_folder_named_like_the_base_does_not_stop_the_start(
    tokenizer: Path, lora_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = [LoraModule("base", str(lora_dir / "p"), is_required=False), LoraModule("p", str(lora_dir / "p"))]
    config = ServerConfig(port=0, in_process=True)
    with (
        BackgroundServer(engine_config(tokenizer), config, given, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["base", "p"]
    assert "adapter_skipped name='base'" in caplog.text


def test_a_fifo_does_not_block_the_server(http: httpx.Client, lora_dir: Path) -> None:
    os.mkfifo(lora_dir / "fifo")
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "f", "lora_path": str(lora_dir / "fifo")}, timeout=5)
    assert answer.status_code in (404, 500)
    assert say(http, "m") == "mno"
