"""A function that lies is ended; the agent and the other functions go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from manylora.agent import agent as agent_module
from manylora.agent.agent import Agent
from manylora.config import EngineConfig, ModelConfig
from manylora.errors import EngineDead, RequestError
from manylora.functions.wire import FunctionState, MeasureNote, Orders, Report
from manylora.hosting.client import EngineClient
from manylora.hosting.functions.checks import MAX_NOTE_CHARS, MessageCheck
from manylora.hosting.functions.messages import FrameError
from manylora.hosting.functions.zygote import ForkedFunction, Zygote
from manylora.hosting.link_function import FunctionLink, FunctionPlace
from manylora.hosting.protocol import (
    EngineInfo,
    EngineSpec,
    FinishedRequest,
    Message,
    Observations,
    Ready,
    Reply,
    StartReport,
    Turn,
)
from manylora.isolation import Measure

NAN = float("nan")
INFO = EngineInfo(
    served_name="base",
    base_name="base",
    architecture="a",
    max_model_len=8,
    vocab_size=9,
    num_pages=1,
    block_size=1,
    page_bytes=1,
    dtype="float32",
)
GOOD = FinishedRequest("mine", "stop", 0.1, 1, 1)


def start(stage: str = "fork", measure: str = "files", note: str = "", took_s: float = 0.1) -> Ready:
    return Ready(INFO, start=StartReport(took_s={stage: took_s}, measures=(Measure(measure, False, note),)))


def turn(**seen: Any) -> Turn:
    return Turn([], Observations(**seen))


def finished(**changes: Any) -> Turn:
    return turn(finished=[structs.replace(GOOD, **changes)])


@pytest.mark.parametrize(
    "message",
    [
        start(stage="x"),
        start(measure="m" * 5000),
        start(took_s=NAN),
        turn(ttft_s={"mine": [0.1, NAN, 0.2]}),
        turn(queue_s=[float("inf")]),
        turn(device_loads_s=[-1.0]),
        turn(inter_token_s={"theirs": [0.1]}),
        turn(step_tokens=[-1]),
        finished(adapter="", num_output_tokens=-1),
        finished(num_prompt_tokens=2**31),
        finished(reason="any label"),
        finished(prefill_s=NAN),
        finished(adapter="theirs"),
    ],
)
def test_a_lie_is_no_message(message: Message) -> None:
    check = MessageCheck({"", "mine"})
    check.checked(start())
    check = MessageCheck({"", "mine"})
    with pytest.raises(FrameError):
        check.checked(message)


def test_a_function_starts_once_with_short_notes() -> None:
    check = MessageCheck({"", "mine"})
    ready = check.checked(start(note="n" * 10_000))
    assert isinstance(ready, Ready) and ready.start is not None
    assert len(ready.start.measures[0].note) == MAX_NOTE_CHARS
    good = turn(ttft_s={"mine": [0.1]}, inter_token_s={"": [0.0, 0.1]}, step_tokens=[4], finished=[GOOD])
    assert check.checked(good) is good
    with pytest.raises(FrameError, match="twice"):
        check.checked(start())


def test_a_snapshot_without_counters_is_an_error_of_the_engine() -> None:
    async def scenario() -> None:
        class Forks:
            async def fork(self, *_: object, **__: object) -> ForkedFunction:
                return ForkedFunction(1)

            def kill(self, function: ForkedFunction) -> None:
                function.end(-9)

        engine = EngineSpec(config=EngineConfig(model=ModelConfig(model="m")), served_name="base", builder="")
        link = FunctionLink(engine, cast(Zygote, Forks()), FunctionPlace(readable=[]))
        client = EngineClient(link, observe=lambda seen: None)
        starting = asyncio.create_task(client.start())
        while link._transport is None:
            await asyncio.sleep(0)
        client._deliver([start()])
        await starting
        taking = asyncio.create_task(client.snapshot())
        await asyncio.sleep(0)
        client._deliver([Reply(1)])
        with pytest.raises(EngineDead, match="without its counters"):
            await taking
        await client.stop()
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_state_that_the_controller_refuses_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller refuses a whole report for one state; the agent sends the rest of it."""
    sent: list[Report] = []

    class Controller:
        error = "wrong"

        async def report(self, node: str, report: Report) -> Orders:
            sent.append(report)
            if any(len(note.name) > 4096 for state in report.functions for note in state.missing) or self.error == "":
                raise RequestError("The controller refused it")
            return Orders(recorded_until_ns=0, generation=1, node=agent.node._spec, backbones={})

    async def scenario() -> None:
        good, bad = FunctionState(name="good", state="awake"), FunctionState(name="bad", state="awake")
        bad = structs.replace(bad, missing=(MeasureNote("m" * 5000, ""),))
        monkeypatch.setattr(agent.node, "describe", lambda: ([good, bad], []))
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
        agent = Agent(
            "here",
            cast(Any, controller),
            cast(Any, None),
            cast(Any, None),
            tmp_path,
            memory_bytes=1 << 30,
            lifeline=None,
        )
        await scenario()

    agent: Agent
    asyncio.run(run())
