"""An agent without functions, and the controller that it follows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import json, structs

from manylora.core import machine
from manylora.core.config import ServerConfig
from manylora.core.errors import EngineDead, RequestError
from manylora.demo import demo_model_path
from manylora.functions.agent import agent as agent_module
from manylora.functions.agent.agent import Agent
from manylora.functions.deployment import BackboneSpec, NodeSpec
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.launch import Timeouts
from manylora.functions.wire import AgentSetup, NodeReport, Orders
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.http.listening import bind
from manylora.serving.metrics.status_report import FunctionState, MeasureNote


def test_an_agent_whose_backbones_change_ends_so_that_the_next_one_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "REPORT_EVERY_S", 0.0)
    reports: list[NodeReport] = []

    class Controller:
        async def report(self, node: str, report: NodeReport) -> Orders:
            reports.append(report)
            model = "demo" if len(reports) < 5 else str(demo_model_path())
            return Orders(
                recorded_until_ns=report.until_ns,
                generation=len(reports),
                node=NodeSpec(),
                backbones={"base": BackboneSpec(model=model)},
                functions={},
            )

    async def scenario() -> None:
        controller = cast(Any, Controller())
        config = ServerConfig(hang_timeout_s=7.0, start_timeout_s=8.0)
        bound = bind("127.0.0.1", 0)
        setup = AgentSetup(node="n", controller="", token=None, server=config, folder=str(tmp_path))
        agent = Agent(setup, controller, bound)
        with pytest.raises(EngineDead, match="other backbones"):
            await asyncio.wait_for(agent.serve(lambda: None), 60.0)
        assert agent.node.timeouts == Timeouts(hang_s=7.0, start_s=8.0)
        assert agent.node.hosts["base"].spec.model == "demo"

    asyncio.run(scenario())
    assert max(one.generation for one in reports) == 4  # later orders are not followed


def test_a_node_has_a_share_of_the_memory_that_its_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the machine's: a container whose functions take more is killed."""
    monkeypatch.setattr(machine, "_groups_around", lambda root, controller: [tmp_path])
    (tmp_path / "memory.max").write_text(str(100 << 20))
    (tmp_path / "memory.current").write_text(str(50 << 20))

    async def scenario() -> None:
        setup = AgentSetup(node="n", controller="", token=None, server=ServerConfig(), folder=str(tmp_path))
        bound = bind("127.0.0.1", 0)
        agent = Agent(setup, cast(Any, None), bound)
        bound.close()
        assert agent.node.room.num_bytes == 40 << 20

    asyncio.run(scenario())


def test_a_state_that_the_controller_refuses_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller refuses a whole report for one state; the agent sends the rest of it."""
    sent: list[NodeReport] = []

    class Controller:
        error = "wrong"

        async def report(self, node: str, report: NodeReport) -> Orders:
            sent.append(report)
            if any(len(note.name) > 4096 for state in report.functions for note in state.missing) or self.error == "":
                raise RequestError("The controller refused it")
            return Orders(recorded_until_ns=0, generation=1, node=NodeSpec(), backbones={})

    async def scenario() -> None:
        good, bad = FunctionState(name="good", state="awake"), FunctionState(name="bad", state="awake")
        bad = structs.replace(bad, missing=(MeasureNote("m" * 5000, ""),))
        monkeypatch.setattr(agent.node, "states", lambda: [good, bad])
        assert not await agent._send()
        assert await agent._send()
        assert [one.name for one in sent[-1].functions] == ["good"]
        controller.error = ""
        with pytest.raises(EngineDead, match="not wanted"):
            await agent._send()
            await agent._send()

    controller = Controller()
    monkeypatch.setattr(agent_module, "url_of", lambda bound: "http://here")

    async def run() -> None:
        nonlocal agent
        setup = AgentSetup(node="here", controller="", token=None, server=ServerConfig(), folder=str(tmp_path))
        agent = Agent(setup, cast(Any, controller), cast(Any, None))
        await scenario()

    agent: Agent
    asyncio.run(run())


def test_a_report_that_functions_have_filled_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too long is refused, and an agent whose report is refused ends with all functions."""
    note = MeasureNote("files", "\x00" * 1000)
    loud = [FunctionState(name=f"loud-{i}", state="awake", missing=(note,) * 15, num_deaths=i) for i in range(50)]
    failed = [FunctionState(name=f"failed-{i}", state="failed", error="\x00" * 4000) for i in range(50)]
    quiet = [FunctionState(name=f"quiet-{i}", state="asleep", num_starts=1, requests_per_s=i) for i in range(1000)]
    sent: list[NodeReport] = []

    class Controller:
        async def report(self, node: str, report: NodeReport) -> Orders:
            sent.append(report)
            return Orders(recorded_until_ns=0, generation=1, node=NodeSpec(), backbones={})

    async def send(*bounds: int) -> None:
        setup = AgentSetup(node="here", controller="", token=None, server=ServerConfig(), folder=str(tmp_path))
        agent = Agent(setup, cast(Any, Controller()), cast(Any, None))
        monkeypatch.setattr(agent.node, "states", lambda: [*loud, *failed, *quiet])
        monkeypatch.setattr(agent.node, "take_lines", lambda: {"loud-0": ["a line"]})
        for max_bytes in bounds:
            monkeypatch.setattr(agent_module, "MAX_REPORT_BYTES", max_bytes)
            assert await agent._send()

    monkeypatch.setattr(agent_module, "url_of", lambda bound: "http://here")
    asyncio.run(send(1 << 26, 1 << 20, 1 << 16))
    whole, short, shortest = sent
    assert whole.functions == [*loud, *failed, *quiet]
    assert (len(short.functions), short.lines, shortest.lines) == (1100, whole.lines, {})
    assert 500 < len(shortest.functions) < 700
    for cut, max_bytes in ((short, 1 << 20), (shortest, 1 << 16)):
        assert len(json.encode(cut)) <= max_bytes
        assert [one.num_deaths for one in cut.functions[:50]] == list(range(50))
        assert {one.name for one in failed} < {one.name for one in cut.functions}
        assert cut.functions[-1].name == "quiet-999"
        assert cut.accounts


def test_an_agent_that_ends_loads_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to its last report has orders as well: a holder that it started then would stay."""
    loaded: list[str] = []
    reports: list[NodeReport] = []

    class Controller:
        async def report(self, node: str, report: NodeReport) -> Orders:
            reports.append(report)
            return Orders(
                recorded_until_ns=report.until_ns,
                generation=1,
                node=NodeSpec(),
                backbones={"base": BackboneSpec(model="demo")},
                functions={},
                hold=["libraries:base"] if len(reports) > 1 else [],
            )

    async def ready(host: BackboneHost) -> None:
        loaded.append(host.name)

    monkeypatch.setattr(agent_module, "REPORT_EVERY_S", 60.0)
    monkeypatch.setattr(BackboneHost, "ready", ready)

    async def scenario() -> None:
        setup = AgentSetup(node="n", controller="", token=None, server=ServerConfig(), folder=str(tmp_path))
        agent = Agent(setup, cast(Any, Controller()), bind("127.0.0.1", 0))
        await asyncio.wait_for(agent.serve(agent.drain), 60.0)

    asyncio.run(scenario())
    assert len(reports) == 2 and not loaded


def test_an_agent_that_is_not_wanted_takes_no_more_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wake the functions that it has just ended."""
    monkeypatch.setattr(agent_module, "REPORT_EVERY_S", 0.0)
    states: list[EngineState] = []

    class Controller:
        async def report(self, node: str, report: NodeReport) -> Orders:
            if not report.is_first:
                raise RequestError("another one")
            backbones = {"base": BackboneSpec(model="demo")}
            return Orders(recorded_until_ns=0, generation=1, node=NodeSpec(), backbones=backbones, functions={})

    async def scenario() -> None:
        async def stop() -> None:
            states.extend(one.state for one in agent._fleets)

        setup = AgentSetup(node="n", controller="", token=None, server=ServerConfig(), folder=str(tmp_path))
        agent = Agent(setup, cast(Any, Controller()), bind("127.0.0.1", 0))
        monkeypatch.setattr(agent.node, "stop", stop)
        with pytest.raises(EngineDead, match="not wanted"):
            await asyncio.wait_for(agent.serve(lambda: None), 60.0)

    asyncio.run(scenario())
    assert states == [EngineState.DRAINING]
