"""The engines of a fleet, from one configuration: a device, a share of the machine and log files for each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from manylora.core.config import EngineConfig
from manylora.core.errors import ConfigError
from manylora.core.machine import count_cores
from manylora.core.server_config import FleetConfig
from manylora.serving.hosting.protocol import EngineSpec
from manylora.serving.hosting.ray.cluster import engine_resources

__all__ = ["engine_specs"]


def engine_specs(engine: EngineConfig, fleet: FleetConfig, *, served_name: str, builder: str) -> list[EngineSpec]:
    """Return the engines of a fleet.

    Engines on one device share it, even those that scaling has not started: each takes its part of
    ``gpu_memory_utilization``, of the CPU's cores, and of the host memory for adapters. On a Ray cluster each has the
    resources that it asks for, and shares the host memory and the cores of its node with as many as the node has room
    for. The step log of engine 1 has ``.1`` before its suffix.
    """
    num, part = fleet.num_places, engine.memory.gpu_memory_utilization
    if fleet.ray is not None and engine.model.tensor_parallel_size > 1:
        size = engine.model.tensor_parallel_size
        raise ConfigError(f"Got tensor_parallel_size = {size}, ray = {fleet.ray!r}, expected one of them")
    if fleet.ray is None and num == 1 and fleet.devices is None:
        return [EngineSpec(config=engine, served_name=served_name, builder=builder)]
    named = [engine.model.device] if fleet.devices is None else fleet.devices.split(",")
    devices = [named[index % len(named)] for index in range(num)]
    on_device = Counter(devices)
    num_threads = None if num == 1 else max(1, count_cores() // num)
    if fleet.ray is not None:  # which gives each engine a node, a device and cores
        resources = engine_resources(fleet.ray_resources, engine.model.device)
        part *= min(1.0, resources.get("GPU", 1.0))
        num_threads = max(1, int(resources.get("CPU", 1)))
    if fleet.ray is not None or engine.simulate is not None:  # of simulated devices there are as many as engines
        on_device = Counter(set(devices))
    configs = [
        replace(
            engine,
            model=replace(engine.model, device=device),
            memory=replace(engine.memory, gpu_memory_utilization=part / on_device[device]),
            num_engines=num,  # on a node of Ray's, which is not known yet, at most
            num_on_device=on_device[device],
            step_log=None if engine.step_log is None else _numbered(engine.step_log, index),
        )
        for index, device in enumerate(devices)
    ]
    return [
        EngineSpec(config=one, served_name=served_name, builder=builder, num_threads=num_threads) for one in configs
    ]


def _numbered(path: str, index: int) -> str:
    file = Path(path)
    return path if index == 0 else str(file.with_name(f"{file.stem}.{index}{file.suffix}"))
