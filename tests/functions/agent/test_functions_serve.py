"""`manylora functions serve`, live: functions answer as a plain engine, whatever is killed, and the bill adds up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from functions_folder import NAMES, PATIENCE_S, ask, functions_folder, tokens_of

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.isolation.landlock import landlock_version
from manylora.functions.controller.bill import make_bill
from manylora.functions.controller.server import LEDGER
from manylora.functions.controller.store import read_ledger
from manylora.functions.decisions.billing import PriceList
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.server.background import BackgroundServer

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or landlock_version() < 4, reason="needs a Linux kernel with Landlock 4"
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with functions_folder() as made:
        yield made


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "manylora", "functions", "serve", "--port", "0", "--drain-timeout", "1"]
    process = subprocess.Popen(
        [*command, "--config", str(folder / "functions.toml"), "--state-dir", str(folder / "state")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serves 3 functions" in line
        yield line.split()[-1], process
    finally:
        process.kill()
        process.communicate()


def overview(folder: Path) -> dict[str, Any]:
    state = folder / "state"
    url = json.loads((state / "controller.json").read_text())["url"]
    token = (state / "token").read_text().strip()
    assert httpx.get(url + "/v1/functions").status_code == 401
    answer = httpx.get(url + "/v1/functions", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S)
    found: dict[str, Any] = answer.json()
    return found


def wait_for_pids(folder: Path) -> dict[str, int]:
    """Return the processes, once the agent has reported every function awake."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError, KeyError, IndexError):
            seen = overview(folder)
            states = {row["name"]: row["state"] for row in seen["functions"]}
            if all(one["state"] == "awake" for one in states.values()):
                node = seen["nodes"][0]
                pids = {name: one["pid"] for name, one in states.items()}
                return pids | {"agent": node["pid"], "controller": seen["pid"], "holder": node["backbones"][0]["pid"]}
        time.sleep(0.1)
    raise AssertionError("the functions are not awake")


@pytest.mark.slow
def test_functions_answer_as_a_plain_engine_whatever_is_killed(folder: Path) -> None:
    modules = [LoraModule(name, str(folder / name)) for name in NAMES]
    config = EngineConfig(
        model=ModelConfig(model=str(folder / "base"), device="cpu"), memory=MemoryConfig(num_pages=256)
    )
    with BackgroundServer(config, lora_modules=modules) as plain:
        expected = {name: tokens_of(ask(plain.url, name)) for name in NAMES}
        long_answer = tokens_of(ask(plain.url, "f1", 200))
    assert len({tuple(one) for one in expected.values()}) == 3

    with serving(folder) as (url, process), ThreadPoolExecutor(8) as pool:
        listed = httpx.get(url + "/v1/models", timeout=PATIENCE_S).json()["data"]
        assert [one["id"] for one in listed] == list(NAMES)
        assert ask(url, "tiny").status_code == 404
        found = {name: pool.submit(ask, url, name) for name in NAMES}  # cold, all at once
        assert {name: tokens_of(one.result()) for name, one in found.items()} == expected

        pids = wait_for_pids(folder)
        long = pool.submit(ask, url, "f1", 200)
        killer = threading.Timer(0.05, os.kill, (pids["f1"], signal.SIGKILL))
        killer.start()
        assert tokens_of(long.result()) == long_answer  # it goes on in the next process
        killer.join()

        os.kill(pids["controller"], signal.SIGKILL)
        os.kill(pids["holder"], signal.SIGKILL)
        assert tokens_of(ask(url, "f2")) == expected["f2"]  # without a controller

        os.kill(wait_for_pids(folder)["agent"], signal.SIGKILL)
        assert tokens_of(ask(url, "f0")) == expected["f0"]  # the connection waits for the next agent
        assert not Path(f"/proc/{pids['f0']}").exists()  # functions ended with their agent

        status = httpx.get(url + "/status", timeout=PATIENCE_S).json()["functions"]
        assert [one["name"] for one in status] == ["f0"]
        assert set(status[0]["last_start"]["stages_s"]) >= {"fork", "confine", "map", "build", "adapter"}

        with httpx.stream("GET", url + "/ui/events", timeout=PATIENCE_S) as stream:
            line = next(line for line in stream.iter_lines() if line.startswith("data: "))
        shown = json.loads(line.removeprefix("data: "))
        assert [one["name"] for one in shown["report"]["functions"]] == ["f0"] and shown["memory_bytes"]["other"] > 0

        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert not (folder / "state" / "backbone-tiny").exists()
    bill = make_bill(*read_ledger(folder / "state" / LEDGER, 0, 2**62), PriceList(), by_tenant=True)
    assert bill.adds_up
    assert 0 < bill.machines.lost_ns < bill.machines.device_ns
    lines = {line.name: line for line in bill.lines}
    assert set(lines) == {"t0", "t1", "(platform)"}
    assert all(lines[name].usage.active_device_ns > 0 and lines[name].usage.cpu_ns > 0 for name in ("t0", "t1"))
    assert lines["t1"].num_requests >= 1
