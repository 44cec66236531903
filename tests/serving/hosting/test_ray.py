"""A fleet on a Ray cluster of several raylets on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from disturbed import answers, leave_alone, replicas_of
from ended import is_gone

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.errors import ConfigError, NoPlace
from manylora.core.server_config import FleetConfig
from manylora.demo import demo_adapters
from manylora.serving.server import BackgroundServer, LoraModule

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PATIENCE_S = 240.0
# KV in 16 bits rounds the last bits in which a step differs from a longer one, and 600 draws then do as well.
ENGINE = EngineConfig(model=ModelConfig(model="demo"), memory=MemoryConfig(num_pages=600, kv_cache_dtype="float32"))


@pytest.fixture(scope="module")
def cluster(engine_path: None) -> Iterator[Any]:
    """A head and two more nodes, each for one engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
        each = {"num_cpus": 2, "resources": {"engines": 1}, "labels": {"zone": "a"}}
        head = {**each, "include_dashboard": False, "_system_config": quick}
        one = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            one.add_node(wait=False, **each)
        one.wait_for_nodes()
        yield one
        one.shutdown()


def wait_for(server: BackgroundServer, index: int) -> dict[str, Any]:
    """Wait until a replica that was lost serves again; return its row."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        row = replicas_of(server)[index]
        if row["num_restarts"] and row["state"] == "serving" and row["num_running"] is not None:
            return row
        assert time.monotonic() < deadline, row
        time.sleep(0.1)


def test_streams_outlive_their_node(cluster: Any) -> None:
    """The text is that of a local engine, also when a node is lost; every engine has the adapters of the book."""
    adapters = list(demo_adapters().items())[:3]
    modules, (added, path) = [LoraModule(name, str(path)) for name, path in adapters[:2]], adapters[2]
    bodies = []
    for index in range(12):
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": index}
        body = {"model": ["demo", added, adapters[0][0]][index % 3], "prompt": f"the {index} birds"}
        bodies.append({**body, "max_tokens": 600, "ignore_eos": True, **sampling})

    with BackgroundServer(
        ENGINE, ServerConfig(port=0, in_process=True), [*modules, LoraModule(added, str(path))]
    ) as local:
        calm = asyncio.run(answers(local.url, bodies, leave_alone))

    fleet = FleetConfig(
        replicas=2,
        ray=cluster.address,
        ray_resources={"CPU": 2, "engines": 1},
        ray_labels={"zone": "a"},
        router="least-loaded",
    )
    config = ServerConfig(port=0, fleet=fleet, allowed_lora_paths=(str(path.parent),))
    with BackgroundServer(ENGINE, config, modules) as server:
        before = replicas_of(server)
        assert len({row["node"] for row in before}) == 2
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
            loaded = http.post("/v1/load_lora_adapter", json={"lora_name": added, "lora_path": str(path)})
            assert loaded.status_code == 200, loaded.text
            assert http.post(f"/adapters/{added}/pin").status_code == 200

            lost: list[str] = []

            async def lose_node(begun: Sequence[asyncio.Event]) -> None:
                await asyncio.gather(*(one.wait() for one in begun))
                rows = await asyncio.to_thread(replicas_of, server)
                rows.sort(key=lambda row: -(row["num_running"] or 0))  # not an engine whose streams have ended
                row, node = next(one for one in product(rows, cluster.worker_nodes) if is_on(one[1], one[0]))
                lost.append(row["node"])
                await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)

            assert asyncio.run(answers(server.url, bodies, lose_node)) == calm
            status = http.get("/status").json()
            assert status["resumes"]["num_resumed"] > 0
            assert (status["resumes"]["num_ended"], status["resumes"]["num_poison"]) == (0, 0)
            index = next(row["index"] for row in before if row["node"] == lost[0])
            again = wait_for(server, index)
            assert again["node"] not in {row["node"] for row in before}
            assert [row["pinned"] for row in replicas_of(server)] == [[added], [added]]
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": added}).status_code == 200
        os.kill(again["pid"], signal.SIGSTOP)
    assert ends(again["pid"])


def is_on(node: Any, row: dict[str, Any]) -> bool:
    """Whether the engine of a row of ``/status`` runs on a node; the server itself is on the head."""
    return bool(node.node_id.startswith(row["node"].rpartition("/")[2]))


def ends(pid: int) -> bool:
    """Wait until a process has ended; return whether it has in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_engines_end_with_a_server_that_is_killed(cluster: Any) -> None:
    """The server is a process of its own here: killed in an answer, it takes its engines with it."""
    line = [sys.executable, "-m", "manylora", "serve", "demo", "--simulate", "a40:llama-7b", "--port", "0"]
    line += ["--ray", cluster.address, "--replicas", "2", "--ray-resource", "CPU=2", "--ray-resource", "engines=1"]
    body = {"model": "demo", "prompt": "the birds", "max_tokens": 400, "ignore_eos": True, "stream": True}
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    process = subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\w.]+:\d+", process.stdout.readline())
        assert found is not None
        with httpx.Client(base_url=found.group(), timeout=60) as client:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                rows = client.get("/status").json()["replicas"]
                if [row["state"] for row in rows] == ["serving", "serving"]:
                    break
                assert time.monotonic() < deadline, rows
                time.sleep(0.1)
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
                process.kill()
    finally:
        process.kill()
        process.communicate()
    assert len({row["node"] for row in rows}) == 2
    assert all(ends(row["pid"]) for row in rows)


def test_a_fleet_without_a_place_says_what_it_needs(cluster: Any) -> None:
    fleet = FleetConfig(ray=cluster.address, ray_resources={"GPU": 1}, ray_timeout_s=3.0)
    with (
        pytest.raises(NoPlace, match=r"within 3 s. It needs CPU=1, GPU=1; . nodes have .*CPU=2, engines=1"),
        BackgroundServer(ENGINE, ServerConfig(port=0, fleet=fleet)),
    ):
        pytest.fail("it started")


def test_amounts_that_ray_refuses_are_an_error(cluster: Any) -> None:
    fleet = FleetConfig(ray=cluster.address, ray_resources={"GPU": 1.5})
    with (
        pytest.raises(ConfigError, match=r"Ray refuses the resources or labels of an engine: .*1\.5"),
        BackgroundServer(ENGINE, ServerConfig(port=0, fleet=fleet)),
    ):
        pytest.fail("it started")


def test_an_address_without_a_cluster_is_an_error() -> None:
    config = ServerConfig(port=0, fleet=FleetConfig(ray="127.0.0.1:1"))
    with (
        pytest.raises(ConfigError, match=r"Got ray = '127.0.0.1:1', and there is no Ray cluster"),
        BackgroundServer(ENGINE, config),
    ):
        pytest.fail("it started")
