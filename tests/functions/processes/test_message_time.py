"""A function that talks without requests takes nothing from others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manylora.core.config import EngineConfig, ModelConfig
from manylora.core.types import Request
from manylora.functions.processes import checks as checks_module
from manylora.functions.processes import link as link_module
from manylora.functions.processes.checks import MAX_BUSY_SHARE, MAX_IDLE_SHARE, MAX_PAUSE_S, WINDOW_S, TimeBudget
from manylora.functions.processes.link import FunctionLink
from manylora.functions.processes.messages import FunctionPlace
from manylora.serving.hosting.protocol import AddRequests, EngineSpec


def test_messages_take_little_time_without_requests() -> None:
    budget = TimeBudget()
    assert budget.spend(0.0, MAX_BUSY_SHARE * WINDOW_S, is_busy=True) == 0.0
    assert budget.spend(0.0, MAX_IDLE_SHARE * WINDOW_S, is_busy=False) == 0.0
    assert budget.spend(0.1, MAX_IDLE_SHARE * WINDOW_S, is_busy=False) == pytest.approx(2 * WINDOW_S - 0.1)
    assert budget.spend(0.2, MAX_BUSY_SHARE * WINDOW_S, is_busy=True) == pytest.approx(2 * WINDOW_S - 0.2)
    assert budget.spend(0.3, MAX_BUSY_SHARE * WINDOW_S, is_busy=True) == 0.0  # another window
    assert budget.spend(0.3, 1e6, is_busy=False) == MAX_PAUSE_S


def test_a_flood_of_messages_is_not_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_PAUSE_S", 1e-6)
    times = iter([0.0, 0.0, 0.0, 1.0, 1.0, 1.0 + 0.9 * MAX_BUSY_SHARE * WINDOW_S])
    monkeypatch.setattr(link_module, "time", SimpleNamespace(thread_time=lambda: next(times)))
    calls: list[str] = []

    async def scenario() -> None:
        reads = asyncio.Event()
        engine = EngineSpec(config=EngineConfig(model=ModelConfig(model="m")), served_name="base", builder="")
        link = FunctionLink(engine, cast(Any, None), FunctionPlace(readable=[]))
        transport = SimpleNamespace(
            is_closing=lambda: False,
            pause_reading=lambda: calls.append("pause"),
            resume_reading=reads.set,
            get_write_buffer_size=lambda: 0,
            write=lambda body: None,
        )
        link.connection_made(cast(Any, transport))
        link.data_received(b"")
        assert not calls
        link.data_received(b"")
        assert calls == ["pause"]
        await reads.wait()
        link.send(AddRequests(1, [Request(request_id="r", prompt=(1,))]))
        link.data_received(b"")
        assert calls == ["pause"]  # with a request it may say more

    asyncio.run(scenario())
