"""An agent without functions, and the controller that it follows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from manylora.agent import agent as agent_module
from manylora.agent.agent import Agent
from manylora.config import ServerConfig
from manylora.demo import demo_model_path
from manylora.errors import EngineDead
from manylora.functions.deployment import BackboneSpec, NodeSpec
from manylora.functions.wire import Orders, Report
from manylora.server.listening import bind


def test_an_agent_whose_backbones_change_ends_so_that_the_next_one_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "REPORT_EVERY_S", 0.0)
    reports: list[Report] = []

    class Controller:
        async def report(self, node: str, report: Report) -> Orders:
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
        bound = bind("127.0.0.1", 0)
        agent = Agent("n", controller, ServerConfig(), bound, tmp_path, memory_bytes=1 << 30, lifeline=None)
        with pytest.raises(EngineDead, match="other backbones"):
            await asyncio.wait_for(agent.serve(lambda: None), 60.0)
        assert agent.node.hosts["base"].spec.model == "demo"

    asyncio.run(scenario())
    assert max(one.generation for one in reports) == 4  # later orders are not followed
