"""Adapters that come with requests: versions of a name, moved at once, bounded and checked as folders are."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reciter import engine_config
from serving import wait_for

from manylora.core.config import AdapterConfig, ServerConfig
from manylora.core.server_config import FleetConfig, PublishConfig
from manylora.serving.hosting.spool import PREFIX
from manylora.serving.http import http_protocol
from manylora.serving.metrics import latency, prometheus
from manylora.serving.server import BackgroundServer

SHM = f"manylora-test-{os.getpid()}-"
MIB = 2**20


def letter_file(letter: str, *, extra: int = 0) -> bytes:
    """Return a safetensors file whose metadata holds the configuration of an adapter that recites from a letter."""
    config = json.dumps({"letter": letter, "rank": 8, "num_pages": 2, "extra": extra})
    return framed({"__metadata__": {"adapter_config": config}})


def framed(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def server(tokenizer: Path, lora_dir: Path) -> Iterator[BackgroundServer]:
    config = ServerConfig(
        port=0,
        fleet=FleetConfig(replicas=2),
        lora_dirs=(str(lora_dir),),
        publish=PublishConfig(publish=True, publish_shm=SHM, publish_bytes=4 * MIB, keep_versions=1),
    )
    engine = replace(engine_config(tokenizer), adapters=AdapterConfig(max_adapter_bytes=MIB))
    with BackgroundServer(engine, config, builder="reciter:reciter_parts") as server:
        yield server


@pytest.fixture
def http(server: BackgroundServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        for name in ("x", "a/b"):
            client.delete(f"/adapters/{name}")
    wait_for(lambda: not folders(server))


def folders(server: BackgroundServer) -> list[str]:
    """Return the folders of published adapters."""
    return sorted(os.listdir(spool_of(server)))


def spool_of(server: BackgroundServer) -> str:
    spool = server._server._spool  # type: ignore[union-attr]
    assert spool is not None and Path(spool.path).name.startswith(PREFIX)
    return spool.path


def put(http: httpx.Client, letter: str, name: str = "x", **terms: Any) -> httpx.Response:
    headers = {"content-type": "application/octet-stream"}
    return http.put(f"/adapters/{name}", content=letter_file(letter), headers=headers, params=terms)


def ask(http: httpx.Client, model: str, num_tokens: int = 3) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": "say", "max_tokens": num_tokens})


def say(http: httpx.Client, model: str) -> str:
    answer = ask(http, model)
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else str(answer.status_code)


def test_a_name_moves_and_its_versions_stay_addressable(http: httpx.Client) -> None:
    first, second = put(http, "b").json(), put(http, "c").json()
    assert (first["model"], second["model"]) == ("x@1", "x@2")
    asked = ("x", "x@1", "x@2", f"x@{first['digest'][:8]}", "base:x", "base:x@1")
    assert [say(http, model) for model in asked] == ["cde", "bcd", "cde", "bcd", "cde", "bcd"]
    third = put(http, "d", version=40).json()
    assert third["model"] == "x@40"
    asked = ("x", "x@40", "x@2", "x@1", "x@39", f"x@{first['digest'][:8]}")
    assert [say(http, model) for model in asked] == ["def", "def", "cde", "404", "404", "404"]
    listed = http.get("/adapters/x/versions").json()["data"]
    assert [(one["version"], one["is_current"]) for one in listed] == [(2, False), (40, True)]
    assert [one["id"] for one in http.get("/v1/models").json()["data"]][-1] == "x"
    assert http.get("/v1/models/x@2").json()["id"] == "x@2"
    assert [one["name"] for one in http.get("/adapters").json()["data"] if "x" in one["name"]] == ["x"]


def test_every_answer_states_its_version(http: httpx.Client, server: BackgroundServer) -> None:
    digest = put(http, "p", "a/b").json()["digest"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    whole = client.completions.with_raw_response.create(model="a/b", prompt="say", max_tokens=3, logprobs=0)
    assert (whole.headers["x-adapter-version"], whole.headers["x-adapter-digest"]) == ("a/b@1", digest)
    parsed = whole.parse()
    assert (parsed.model, parsed.adapter_version) == ("a/b", "a/b@1")  # type: ignore[attr-defined]
    assert parsed.system_fingerprint is not None and parsed.system_fingerprint.endswith(digest[:12])
    assert parsed.choices[0].logprobs is not None and parsed.choices[0].logprobs.token_logprobs == [-0.5] * 3
    messages: Any = [{"role": "user", "content": "say"}]
    chunks = list(client.chat.completions.create(model="a/b@1", messages=messages, max_tokens=3, stream=True))
    assert {chunk.adapter_version for chunk in chunks} == {"a/b@1"}  # type: ignore[attr-defined]
    response = client.responses.with_raw_response.create(model="a/b", input="say", max_output_tokens=3)
    assert response.headers["x-adapter-version"] == "a/b@1"
    assert response.http_response.json()["adapter_version"] == "a/b@1"
    base = ask(http, "base")
    assert "x-adapter-version" not in base.headers and "adapter_version" not in base.json()


def test_an_adapter_from_a_folder_has_versions_too(http: httpx.Client, lora_dir: Path) -> None:
    load = {"lora_name": "x", "lora_path": str(lora_dir / "p")}
    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert ask(http, "x").headers["x-adapter-version"] == "x@1"
    assert put(http, "q").json()["model"] == "x@2"
    assert [say(http, model) for model in ("x", "x@1")] == ["qrs", "pqr"]
    load = {"lora_name": "x", "lora_path": str(lora_dir / "p"), "load_inplace": True}
    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert [say(http, model) for model in ("x", "x@3", "x@2", "x@1")] == ["pqr", "pqr", "qrs", "404"]
    taken = http.post("/v1/load_lora_adapter", json={**load, "lora_name": "x@7", "load_inplace": False})
    assert taken.status_code == 400


def test_streams_finish_on_their_version_and_it_is_freed_then(server: BackgroundServer, http: httpx.Client) -> None:
    put(http, "p")
    began, texts = threading.Event(), []

    def stream() -> None:
        body = {"model": "x", "prompt": "say", "max_tokens": 200, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            text = ""
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    began.set()
                    text += json.loads(line[6:])["choices"][0]["text"]
            texts.append((answer.headers["x-adapter-version"], text))

    thread = threading.Thread(target=stream)
    thread.start()
    assert began.wait(60)
    assert put(http, "q", keep_versions=0).json()["model"] == "x@2"
    thread.join(60)
    alphabet = "pqrstuvwxyzabcdefghijklmno" * 10
    assert texts == [("x@1", alphabet[:200])]
    wait_for(lambda: len(http.get("/adapters/x/versions").json()["data"]) == 1)
    wait_for(lambda: len(folders(server)) == 1)
    assert say(http, "x@1") == "404"


def test_a_lease_ends_after_its_time(http: httpx.Client) -> None:
    put(http, "p")
    put(http, "q", keep_versions=5, ttl_s=0.3)
    assert say(http, "x") == "qrs"
    wait_for(lambda: say(http, "x@1") == "404")


def test_a_version_is_on_the_devices_before_its_name_moves(http: httpx.Client) -> None:
    put(http, "p")
    assert put(http, "q", preload=True).json()["status"]["tier"] == "device"
    pinned = put(http, "r", pin=True, preload=True).json()
    assert pinned["status"]["tier"] == "device"
    wait_for(lambda: http.get("/adapters/x").json()["pinned"] is True)
    assert put(http, "s").json()["model"] == "x@4"
    wait_for(lambda: http.get("/adapters/x").json()["generation"] == 4)
    assert http.get("/adapters/x").json()["pinned"] is True
    assert http.post("/adapters/x@3/pin").json()["name"] == "x@3"
    put(http, "t")
    put(http, "u")
    assert [say(http, f"x@{number}") for number in (3, 4, 5)] == ["rst", "404", "tuv"]
    assert http.delete("/adapters/x@6").status_code == 400
    assert http.delete("/adapters/x@3").status_code == 200
    assert say(http, "x@3") == "404"


def test_shared_memory(http: httpx.Client, tmp_path: Path) -> None:
    file = Path("/dev/shm") / f"{SHM}one"

    def publish(**fields: Any) -> httpx.Response:
        return http.put("/adapters/x", json={"shm": file.name, **fields})

    assert publish().status_code == 404
    try:
        file.write_bytes(letter_file("p"))
        assert publish(preload=True).json()["model"] == "x@1"
        config = {"letter": "z", "rank": 8, "num_pages": 2}
        file.write_bytes(framed({}))
        assert publish(adapter_config=config).json()["model"] == "x@2"
        assert [say(http, model) for model in ("x", "x@1")] == ["zab", "pqr"]
        assert publish(move=True).status_code == 400  # no configuration
        assert not file.exists()
        file.write_bytes(letter_file("d"))
        assert publish(move=True).json()["model"] == "x@3" and not file.exists()
        assert [say(http, model) for model in ("x", "x@2")] == ["def", "zab"]
        assert publish(adapter_config={"letter": 1} | {"pad": "x" * MIB}).status_code in (400, 413)
        file.write_bytes(bytes(MIB + 1))
        assert publish().status_code == 400
        file.unlink()
        file.symlink_to("/etc/passwd")
        assert publish().status_code == 400
        file.unlink()
        os.mkfifo(file)
        assert publish().status_code == 400
    finally:
        file.unlink(missing_ok=True)
    for name in ("other", f"../{SHM}", f"{SHM}/../x", f"{SHM}a/b", "", f"{SHM}\0", SHM + "a" * 300):
        assert http.put("/adapters/x", json={"shm": name, "move": True}).status_code == 403, name
    assert say(http, "x") == "def"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"\xff" * 64, 400),
        (framed({"__metadata__": {"adapter_config": 3}}), 400),
        (framed({"__metadata__": {"adapter_config": "{}"}}), 400),
        (framed({"__metadata__": {"adapter_config": "[" * 100_000}}), 400),
        (framed({}), 400),
        (bytes(MIB + 1), 413),
    ],
)
def test_a_body_that_is_no_adapter_is_refused(
    http: httpx.Client, server: BackgroundServer, content: bytes, status: int
) -> None:
    put(http, "p")
    headers = {"content-type": "application/octet-stream"}
    answer = http.put("/adapters/x", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert spool_of(server) not in answer.text
    assert say(http, "x") == "pqr"
    assert len(folders(server)) == 1


@pytest.mark.parametrize(
    ("terms", "word"),
    [
        ({"version": 0}, "version"),
        ({"version": "three"}, "version"),
        ({"keep_versions": -1}, "keep_versions"),
        ({"ttl_s": "nan"}, "ttl_s"),
        ({"pinned": True}, "pinned"),
        ({"version": 1}, "numbers grow"),
    ],
)
def test_wrong_terms_are_refused_by_name(http: httpx.Client, terms: dict[str, Any], word: str) -> None:
    put(http, "p")
    answer = put(http, "q", **terms)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
    assert say(http, "x") == "pqr"


def test_names_and_media_types_are_checked(http: httpx.Client) -> None:
    assert put(http, "p", "base").status_code == 400
    assert put(http, "p", "@x").status_code in (400, 404)
    assert put(http, "p", "x" * 250).status_code == 400
    assert put(http, "p").status_code == 200
    assert put(http, "p", "x@5").status_code == 400
    assert http.put("/adapters/x", content=b"", headers={"content-type": "text/plain"}).status_code == 415


def test_memory_for_published_adapters_is_bounded(http: httpx.Client, server: BackgroundServer) -> None:
    headers = {"content-type": "application/octet-stream"}
    config = json.dumps({"letter": "p", "rank": 8, "num_pages": 2})
    data = bytes(900_000)
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    body = framed({"__metadata__": {"adapter_config": config}, "t": tensor}, data)
    for _ in range(4):
        assert http.put("/adapters/x?keep_versions=9", content=body, headers=headers).status_code == 200
    full = http.put("/adapters/x?keep_versions=9", content=body, headers=headers)
    assert full.status_code == 503
    assert "--publish-memory" in full.json()["error"]["message"]
    assert say(http, "x@4") == "pqr"


def test_publishing_is_off_without_its_flag(http: httpx.Client, tokenizer: Path) -> None:
    with (
        BackgroundServer(
            engine_config(tokenizer), ServerConfig(port=0, in_process=True), builder="reciter:reciter_parts"
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        answer = put(client, "p")
        assert answer.status_code == 403
        assert "--publish" in answer.json()["error"]["message"]


def num_held() -> int:
    """Return the project's objects in this process, and the entries of their containers.

    Others, and answers of the HTTP protocol, go in waves: the event loop keeps some hundred timers that were cancelled.
    Windows of latencies have slices by time.
    """
    waves = (http_protocol.__name__, latency.__name__)
    gc.collect()
    modules = [(str(type(one).__module__), one) for one in gc.get_objects()]
    ours = [one for name, one in modules if name.startswith("manylora.") and name not in waves]
    parts = [part for one in ours for part in gc.get_referents(one)]
    parts += [value for part in parts if type(part) is dict for value in part.values()]
    return len(ours) + sum(len(part) for part in parts if type(part) in (dict, list, set, deque, OrderedDict))


def test_nothing_is_held_of_versions_that_are_freed(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs in this process, so that its entries are counted with those of the API."""
    monkeypatch.setattr(prometheus, "MAX_MOVES", 64)  # which the live page shows, of the last versions
    config = ServerConfig(port=0, in_process=True, publish=PublishConfig(publish=True))
    held: list[int] = []
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for number in range(110):  # the last 64 waits of requests and moves of adapters are kept
            content = letter_file("p", extra=number)
            headers = {"content-type": "application/octet-stream"}
            assert http.put("/adapters/x", content=content, headers=headers).json()["version"] == number + 1
            assert say(http, "x") == "pqr"
            if number in (69, 109):
                wait_for(lambda: len(folders(server)) == 2)
                held.append(num_held())
    assert held[1] - held[0] < 40, held


def test_a_restarted_engine_holds_the_same_versions(http: httpx.Client, server: BackgroundServer) -> None:
    put(http, "p")
    put(http, "q")
    for replica in server._server.fleet.engines.replicas():  # type: ignore[union-attr]
        assert replica.pid is not None
        os.kill(replica.pid, 9)
    time.sleep(0.01)
    deadline = time.monotonic() + 60
    while http.get("/health").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(4):
        assert [say(http, model) for model in ("x", "x@1", "x@2")] == ["qrs", "pqr", "qrs"]
