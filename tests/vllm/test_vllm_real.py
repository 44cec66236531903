"""A real vLLM with the plug-in. ``make vllm`` sets its environment up; where vLLM is missing, nothing here can run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_real import NUM_ADAPTERS, RealServer, answer_offline, registry, serving, write_adapter

pytest.importorskip("vllm.entrypoints", reason="run by `make vllm`, in an environment that has vLLM")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(NUM_ADAPTERS):
        write_adapter(folder / f"a{number}", number)
    return folder


@pytest.fixture(scope="module")
def stock(adapters: Path) -> list[list[int]]:
    return answer_offline(adapters, None)


@pytest.fixture(scope="module")
def server(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folders = {f"a{number}": adapters / f"a{number}" for number in range(24)}
    folders["broken"] = write_adapter(adapters / "broken", 99)
    with serving(folders, {"look_ahead": 4}, tmp_path_factory.mktemp("log") / "serve.log") as server:
        yield server


@pytest.mark.parametrize(
    "options", [{}, {"policy": "sjf", "eviction": "lru", "blocking_loads": True}, {"beside": True, "look_ahead": 3}]
)
def test_tokens_are_those_of_vllm(options: dict[str, object], adapters: Path, stock: list[list[int]]) -> None:
    """Greedy and drawn by seed, 64 adapters through 8 slots."""
    assert len({tuple(tokens) for tokens in stock}) > NUM_ADAPTERS, "the adapters differ"
    assert answer_offline(adapters, options) == stock


def test_adapters_load_beside_the_steps(server: RealServer) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(server.complete, [f"a{number % 24}" for number in range(72)]))
    assert all(answers[number] == answers[number % 24] for number in range(72))
    metrics = server.metrics()
    assert metrics["adapter_copies"] >= 24 and metrics["adapter_reads"] >= 24
    assert metrics["adapter_blocking_loads"] == metrics["adapter_load_failures"] == 0
    assert metrics["adapter_requests"] >= 72 and metrics["adapter_evictions"] >= 16
    assert sum(name.endswith(" device") for name in metrics) == 8


def test_prompts_that_skip_the_prefix_cache_wait_as_well(server: RealServer) -> None:
    for number in range(12):
        assert server.complete(f"a{number}", prompt_logprobs=1, max_tokens=2)
    assert server.metrics()["adapter_blocking_loads"] == 0


def test_a_changed_folder_is_another_version_with_prefix_blocks_of_its_own(server: RealServer, adapters: Path) -> None:
    prompt = "one two three four five " * 12
    before = server.complete("a1", prompt=prompt)
    assert server.complete("a1", prompt=prompt) == before
    write_adapter(adapters / "a1", 1001)
    after = server.complete("a1", prompt=prompt)
    assert after != before
    write_adapter(adapters / "fresh", 1001)
    status, text = server.call("/v1/load_lora_adapter", {"lora_name": "fresh", "lora_path": str(adapters / "fresh")})
    assert status == 200, text
    assert server.complete("fresh", prompt=prompt) == after, "no block of the old weights was used"
    write_adapter(adapters / "a1", 1)
    assert server.complete("a1", prompt=prompt) == before


def test_a_request_ends_whose_adapter_cannot_be_read_and_others_go_on(server: RealServer, adapters: Path) -> None:
    weights = adapters / "broken" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:100], None):
        weights.unlink()
        if content is not None:
            weights.write_bytes(content)
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(server.complete, "a3")
            body = {"model": "broken", "prompt": "x", "max_tokens": 4}
            status, text = server.call("/v1/completions", body)
            assert other.result()
        assert status >= 400 or json.loads(text)["choices"][0]["finish_reason"] == "error", text
    weights.write_bytes(whole)
    assert server.complete("broken")


def test_an_adapter_without_a_config_is_not_registered(server: RealServer, tmp_path: Path) -> None:
    status, _ = server.call("/v1/load_lora_adapter", {"lora_name": "none", "lora_path": str(tmp_path)})
    assert status == 404


def test_adapters_come_go_and_change_under_load(server: RealServer, adapters: Path) -> None:
    ends: list[str] = []

    def ask(number: int) -> None:
        ends.append(server.complete(f"a{number % 20}", max_tokens=3 + number % 5))

    def disturb() -> None:
        for number in range(12):
            name, path = f"come{number % 3}", write_adapter(adapters / f"come{number % 3}", 2000 + number)
            server.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            server.complete(name)
            write_adapter(path, 3000 + number)
            server.call("/v1/unload_lora_adapter", {"lora_name": name})

    disturber = threading.Thread(target=disturb)
    disturber.start()
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(ask, range(120)))
    disturber.join()
    assert len(ends) == 120
    time.sleep(0.2)
    server.complete("a0")
    metrics = server.metrics()
    assert metrics["adapter_blocking_loads"] == 0
    assert sum(name.endswith(" device") for name in metrics) == 8, "no slot was lost"


def test_it_serves_beside_another_connector_from_registries(adapters: Path, tmp_path: Path) -> None:
    """Its metrics and its orders find their way through a multi connector; adapters that no one loaded are fetched."""
    (adapters / "team").mkdir(exist_ok=True)
    for number in range(3):
        write_adapter(adapters / "team" / f"far{number}", 40 + number)
    broken = write_adapter(adapters / "team" / "torn", 43) / "adapter_model.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    folders = {f"a{number}": adapters / f"a{number}" for number in range(40, 52)}
    with registry(adapters / "team") as (url, asked):
        environment = {"MANYLORA_LORA_REGISTRY": url, "MANYLORA_LORA_CACHE": str(tmp_path / "cache")}
        with serving(folders, {"beside": True}, tmp_path / "serve.log", environment) as server:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(server.complete, [*folders, *(f"far{number}" for number in range(3))] * 3))
            for number in range(3):
                assert server.complete(f"far{number}") == server.complete(f"a{40 + number}"), "the same weights"
            assert sum("far0/adapter_model" in path for path in asked) <= 2, "the head and the file, once"
            body = {"prompt": "x", "max_tokens": 2}
            assert server.call("/v1/completions", {"model": "nowhere", **body})[0] == 404
            assert server.call("/v1/completions", {"model": "../a1", **body})[0] == 404
            status, text = server.call("/v1/completions", {"model": "torn", **body})
            assert status >= 400 or json.loads(text)["choices"][0]["finish_reason"] == "error", text
            for name in folders:  # the slot that was to be the torn one's is another's
                assert server.complete(name)
            metrics = server.metrics()
            assert metrics["adapter_copies"] >= 15 and metrics["adapter_blocking_loads"] == 0
            assert sum(name.endswith(" device") for name in metrics) == 8
    assert len(list((tmp_path / "cache").iterdir())) == 4, "a folder for each, and nothing half made"


def test_the_command_says_what_is_active(server: RealServer) -> None:
    def check(*arguments: str) -> str:
        command = [sys.executable, "-m", "manylora", "check-vllm", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    assert re.search(r"active; options given: \{'look_ahead': '4'\}", check(server.url))
    assert "--kv-transfer-config" in check()
