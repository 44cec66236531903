"""The engines of a fleet, from one configuration."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import MagicMock

import msgspec
import pytest

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.server_config import FleetConfig
from manylora.serving.hosting.protocol import EngineSpec
from manylora.serving.hosting.ray.actor import CurveKeys, Door
from manylora.serving.hosting.ray.cluster import RayCluster, engine_resources, engines_on_node
from manylora.serving.hosting.ray.link import RayLink
from manylora.serving.server.serve import engine_specs

ENGINE = EngineConfig(
    model=ModelConfig(model="demo", device="cpu"),
    memory=MemoryConfig(gpu_memory_utilization=0.8),
    step_log="logs/steps.jsonl",
)


def specs(**fleet: object) -> list[EngineSpec]:
    return engine_specs(ENGINE, FleetConfig(**fleet), served_name="demo", builder="b")  # type: ignore[arg-type]


def test_one_engine_is_as_configured() -> None:
    (spec,) = specs()
    assert spec.config is ENGINE
    assert spec.num_threads is None


def test_engines_take_devices_in_turn_and_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.serving.server.serve.count_cores", lambda: 16)
    found = specs(replicas=3, devices="cuda:0,cuda:1")
    assert [spec.config.model.device for spec in found] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [spec.config.memory.gpu_memory_utilization for spec in found] == [0.4, 0.8, 0.4]
    assert [spec.num_threads for spec in found] == [5, 5, 5]
    assert [spec.config.num_engines for spec in found] == [3, 3, 3]
    assert [spec.config.step_log for spec in found] == [
        "logs/steps.jsonl",
        "logs/steps.1.jsonl",
        "logs/steps.2.jsonl",
    ]
    assert [spec.num_threads for spec in specs(replicas=32)] == [1] * 32
    simulated = engine_specs(
        replace(ENGINE, simulate="a10:llama-7b"), FleetConfig(replicas=2), served_name="demo", builder="b"
    )
    assert [spec.config.memory.gpu_memory_utilization for spec in simulated] == [0.8, 0.8]


def test_an_empty_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="names between commas"):
        FleetConfig(devices="cuda:0,,cuda:1")


def test_engines_on_ray_take_what_they_ask_for() -> None:
    found = specs(replicas=2, ray="auto", ray_resources={"CPU": "6", "GPU": 0.5, "memory": "32e9", "slot": 1})
    assert [spec.num_threads for spec in found] == [6, 6]
    assert [spec.config.memory.gpu_memory_utilization for spec in found] == [0.4, 0.4]
    assert [spec.config.num_engines for spec in found] == [2, 2]
    assert [spec.config.step_log for spec in found] == ["logs/steps.jsonl", "logs/steps.1.jsonl"]
    assert engine_resources({}, "cuda") == {"CPU": 1, "GPU": 1}
    assert engine_resources({"CPU": "2"}, "auto") == {"CPU": 2}
    for amount in ("0", "-1", "many", "inf", None):
        with pytest.raises(ConfigError, match=r"Got --ray-resource GPU=.*, expected an amount above 0"):
            engine_resources({"GPU": amount}, "auto")


def test_options_that_do_not_go_with_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected --ray-resource GPU=1"):
        FleetConfig(ray="auto", devices="cuda:0")
    with pytest.raises(ConfigError, match="expected one of them"):
        ServerConfig(in_process=True, fleet=FleetConfig(ray="auto"))


def test_an_address_that_ray_cannot_join_and_a_lack_of_ray_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.serving.hosting.ray.cluster.find_spec", lambda name: object())
    for address in ("ray://head:10001/", "head", "head:"):
        with pytest.raises(ConfigError, match="expected auto or HOST:PORT"):
            RayCluster(FleetConfig(ray=address), {"CPU": 1.0})
    monkeypatch.setattr("manylora.serving.hosting.ray.cluster.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        RayCluster(FleetConfig(ray="auto"), {"CPU": 1.0})


@pytest.mark.parametrize(
    ("node", "each", "most", "expected"),
    [
        ({"CPU": 64, "GPU": 8}, {"CPU": 1, "GPU": 1}, 16, 8),
        ({"CPU": 64, "GPU": 8}, {"CPU": 1, "GPU": 1}, 3, 3),
        ({"CPU": 64, "GPU": 1}, {"CPU": 1, "GPU": 1}, 3, 1),
        ({"CPU": 64, "GPU": 1}, {"CPU": 1, "GPU": 0.1}, 16, 10),
        ({"CPU": 8, "memory": 100e9}, {"CPU": 1, "memory": 40e9}, 4, 2),
        ({}, {"CPU": 1}, 4, 1),
    ],
)
def test_a_node_has_as_many_engines_as_it_has_room_for(
    node: dict[str, float], each: dict[str, float], most: int, expected: int
) -> None:
    assert engines_on_node(node, each, most) == expected


class FakeCluster:
    """A cluster, and the place there: its node has two GPUs. Keeps the engine that it was asked to start."""

    keys, resources = CurveKeys(b"", b""), {"GPU": 1.0}

    def __init__(self) -> None:
        self.started = b""

    async def open(self) -> Door:
        ports = {"commands_port": 1, "messages_port": 2}
        return Door(version="1", node="n", host="127.0.0.1", public_key=b"", resources={"GPU": 2.0}, **ports)

    async def start(self, engine: bytes, log_level: int) -> int:
        self.started = engine
        return 7

    async def exit_code(self) -> int:
        return 0

    async def remove(self) -> None:
        pass


def test_an_engine_shares_its_node_with_those_that_the_node_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.serving.hosting.ray.link.EngineConnection", MagicMock())
    monkeypatch.setattr("manylora.serving.hosting.ray.link.RayPlace", lambda cluster: cluster)
    cluster = FakeCluster()
    spec = specs(replicas=5, ray="auto")[0]

    async def start() -> None:
        link = RayLink(spec, cluster)  # type: ignore[arg-type]
        await link.start(lambda messages: None)
        await link.stop()

    asyncio.run(start())
    started = msgspec.msgpack.decode(cluster.started, type=EngineSpec)
    assert started.config.num_engines == 2
    assert replace(started.config, num_engines=5) == spec.config
