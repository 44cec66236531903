"""The engines of a fleet, from one configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manylora.config import EngineConfig, FleetConfig, MemoryConfig, ModelConfig
from manylora.errors import ConfigError
from manylora.hosting.engine_specs import engine_specs
from manylora.hosting.protocol import EngineSpec

ENGINE = EngineConfig(
    model=ModelConfig(model="demo", device="cpu"),
    memory=MemoryConfig(gpu_memory_utilization=0.8),
    step_log="logs/steps.jsonl",
    request_log="requests.jsonl",
)


def specs(**fleet: object) -> list[EngineSpec]:
    return engine_specs(ENGINE, FleetConfig(**fleet), served_name="demo", builder="b")  # type: ignore[arg-type]


def test_one_engine_is_as_configured() -> None:
    (spec,) = specs()
    assert spec.config is ENGINE
    assert spec.num_threads is None


def test_engines_take_devices_in_turn_and_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    found = specs(replicas=3, devices="cuda:0,cuda:1")
    assert [spec.config.model.device for spec in found] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [spec.config.memory.gpu_memory_utilization for spec in found] == [0.4, 0.8, 0.4]
    assert [spec.num_threads for spec in found] == [5, 5, 5]
    assert [spec.config.step_log for spec in found] == [
        "logs/steps.jsonl",
        "logs/steps.1.jsonl",
        "logs/steps.2.jsonl",
    ]
    assert {spec.config.request_log for spec in found} == {"requests.jsonl"}
    assert [spec.num_threads for spec in specs(replicas=32)] == [1] * 32
    simulated = engine_specs(
        replace(ENGINE, simulate="a10:llama-7b"), FleetConfig(replicas=2), served_name="demo", builder="b"
    )
    assert [spec.config.memory.gpu_memory_utilization for spec in simulated] == [0.8, 0.8]


def test_an_empty_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="names between commas"):
        FleetConfig(devices="cuda:0,,cuda:1")
