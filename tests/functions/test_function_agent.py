"""An agent without functions, and the controller that it follows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from manylora.core.config import ServerConfig
from manylora.core.errors import EngineDead
from manylora.demo import demo_model_path
from manylora.functions.agent import agent as agent_module
from manylora.functions.agent.agent import Agent
from manylora.functions.deployment import BackboneSpec, NodeSpec
from manylora.functions.node.launch import Timeouts
from manylora.functions.wire import NodeReport, Orders
from manylora.serving.http.listening import bind


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
        agent = Agent("n", controller, config, bound, tmp_path, memory_bytes=1 << 30, lifeline=None)
        with pytest.raises(EngineDead, match="other backbones"):
            await asyncio.wait_for(agent.serve(lambda: None), 60.0)
        assert agent.node.timeouts == Timeouts(hang_s=7.0, start_s=8.0)
        assert agent.node.hosts["base"].spec.model == "demo"

    asyncio.run(scenario())
    assert max(one.generation for one in reports) == 4  # later orders are not followed
