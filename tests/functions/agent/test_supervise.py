"""The supervisor tells why it ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError, EngineDead
from manylora.functions.agent import cluster as cluster_module
from manylora.functions.agent import supervise as supervise_module
from manylora.functions.agent.cluster import _Agents
from manylora.functions.agent.supervise import Child, keep_until_stopped
from manylora.functions.wire import AgentSetup, ControllerSetup
from manylora.serving.hosting.fleet.keeper import RestartPolicy
from manylora.serving.hosting.ray.nodes import NodeActor, RayNode


def test_a_part_that_cannot_be_started_is_an_error_of_the_supervisor() -> None:
    class Child:
        def __init__(self, error: Exception | None = None) -> None:
            self.error = error
            self.is_stopped = False

        async def keep(self) -> None:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()

        async def stop(self) -> None:
            self.is_stopped = True

    controller, agent = Child(), Child(FileNotFoundError("no interpreter"))
    with pytest.raises(FileNotFoundError, match="interpreter"):
        asyncio.run(keep_until_stopped(controller, agent))
    assert controller.is_stopped and agent.is_stopped


def test_a_controller_that_has_worked_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk may be full, or its file half written; the agent serves without it."""
    num_runs = 0

    async def run(*_: object, **__: object) -> SimpleNamespace:
        nonlocal num_runs
        num_runs += 1
        if num_runs > 20:
            child._is_stopping = True

        async def communicate(setup: bytes) -> None:
            await asyncio.sleep(0)

        return SimpleNamespace(returncode=2, communicate=communicate)

    def keep(one: Child, healthy_after_s: float) -> None:
        policy = RestartPolicy(max_deaths=10, first_pause_s=0.0, max_pause_s=0.0, healthy_after_s=healthy_after_s)
        monkeypatch.setattr(supervise_module, "RESTARTS", policy)
        asyncio.run(one.keep())

    monkeypatch.setattr(asyncio, "create_subprocess_exec", run)
    setup = ControllerSetup(config="", folder="", token=None)
    for child, healthy_after_s in ((Child("m", setup), 0.0), (Child("m", setup, is_optional=True), 60.0)):
        with pytest.raises(EngineDead, match="exit code 2"):
            keep(child, healthy_after_s)
    child = Child("m", setup, is_optional=True)
    keep(child, 0.0)
    assert num_runs == 21


def test_agents_are_kept_while_the_head_of_the_cluster_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []

    async def nodes(cluster: object) -> list[RayNode]:
        looks.append(True)
        if len(looks) == 1:
            raise ConnectionError("no head")
        if len(looks) > 2:
            raise ConfigError("no cluster at all")
        return [RayNode("id", "10.0.0.1")]

    kept: list[str] = []

    class Agents(_Agents):
        async def _keep_on(self, node: RayNode) -> None:
            kept.append(node.node_id)

    monkeypatch.setattr(cluster_module, "fitting_nodes", nodes)
    monkeypatch.setattr(cluster_module, "LOOK_EVERY_S", 0.0)
    with pytest.raises(ConfigError):
        asyncio.run(Agents(cast(Any, None), cast(Any, None), None).keep())
    assert kept == ["id"]


def test_an_agent_that_ray_cannot_start_or_kill_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Actor(NodeActor):
        def _begin(self, method: str, arguments: tuple[Any, ...]) -> Any:
            self._actor = object()
            raise ConnectionError("the head is away")

    def kill(actor: object) -> None:
        raise ConnectionError("the head is still away")

    class Cluster:
        async def call(self, work: Callable[[], Any]) -> Any:
            return work()

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=kill))
    monkeypatch.setattr(cluster_module, "NodeActor", Actor)
    setup = AgentSetup(node="", controller="", token=None, server=ServerConfig(), folder="", log_level=0)
    asyncio.run(_Agents(cast(Any, Cluster()), setup, None)._keep_on(RayNode("id", "10.0.0.1")))
