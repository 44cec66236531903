"""The room of an engine, as its client counts it between two turns: as many requests pass as the engine would take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from harness import engine_info

from manylora.core.errors import CapacityError
from manylora.core.types import AdapterKey, Continuation, Request, SamplingParams
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.links.in_flight import InFlightRequest, OutputStream
from manylora.serving.hosting.protocol import (
    AddRequests,
    Command,
    Ending,
    EngineRoom,
    Fault,
    Message,
    Observations,
    Ready,
    Reply,
    Turn,
)

INFO = engine_info(vocab_size=1000)
FULL = Fault.of(CapacityError("full", retry_after_s=3.0, every_s=0.5))


class QuietEngine:
    """A link that keeps commands; the test answers them."""

    pid = node = None

    def __init__(self) -> None:
        self.calls: list[int] = []

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        self.deliver = deliver
        asyncio.get_running_loop().call_soon(deliver, [Ready(INFO)])

    def send(self, command: Command) -> None:
        if isinstance(command, AddRequests):
            self.calls.append(command.call)

    async def closed(self) -> Ending:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        pass

    def turn(self, room: int | None) -> None:
        self.deliver([Turn([], Observations(), None if room is None else EngineRoom(room, FULL))])


def flight(name: str) -> InFlightRequest:
    return InFlightRequest(Request(request_id=name, prompt=(1,), sampling=SamplingParams(max_tokens=9)), OutputStream())


def test_as_many_requests_pass_as_the_engine_has_room_for() -> None:
    async def main() -> None:
        engine = QuietEngine()
        client = EngineClient(engine, observe=lambda observed: None)
        await client.start()
        submitted = []

        def submit(name: str) -> None:
            if client.refusal is not None:
                raise client.refusal
            submitted.append(asyncio.ensure_future(client.submit([flight(name)])))

        submit("a")
        engine.turn(2)  # it has not seen a
        submit("b")
        with pytest.raises(CapacityError, match="full") as caught:
            submit("c")
        assert (caught.value.status, caught.value.retry_after_s, caught.value.every_s) == (429, 3.0, 0.5)
        engine.deliver([Reply(engine.calls[0], fault=Fault.of(CapacityError("another reason")))])
        await asyncio.gather(submitted[0], return_exceptions=True)
        submit("d")  # a took no room
        with pytest.raises(CapacityError):
            submit("e")
        engine.deliver([Reply(call) for call in engine.calls[1:]])
        with pytest.raises(CapacityError):
            submit("e")  # accepted, but room is told with turns alone
        engine.turn(1)
        submit("e")
        with pytest.raises(CapacityError):
            submit("f")
        engine.turn(None)
        for index in range(5):
            submit(f"g{index}")
        client.cancel([f"g{index}" for index in range(5)] + ["b", "d", "e"])
        engine.turn(0)
        submit("h")  # an engine without requests is not full, whatever it said last
        for task in submitted:
            task.cancel()
        await asyncio.gather(*submitted, return_exceptions=True)

    asyncio.run(main())


def test_a_request_that_was_begun_goes_on_after_all_of_its_answer() -> None:
    begun = Continuation(tokens=(5, 6), adapter=AdapterKey("k"))
    one = flight("a")
    one.request = replace(one.request, continuation=begun)
    assert one.next_request().continuation == begun
    one.answered.append(7)
    assert one.next_request().continuation == Continuation(tokens=(5, 6, 7), adapter=AdapterKey("k"))
