"""Work in turns: in rounds over callers, half of the line for each at most, and none for a client that left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from manylora.core.errors import CapacityError
from manylora.serving.http.auth import Gate
from manylora.serving.http.turns import ClientGone, FairWork


class Bench:
    """Work at which one piece is done at a time, by name: the first letter is the caller."""

    def __init__(self, max_waiting: int) -> None:
        self.work = FairWork("texts", Gate().caller_of, max_waiting=max_waiting, num_at_once=1)
        self.opened, self.ran = threading.Event(), list[str]()
        self.gone: dict[str, asyncio.Event] = {}

    def _do(self, name: str) -> str:
        self.opened.wait()
        self.ran.append(name)
        return name

    def run(self, name: str) -> Awaitable[str]:
        gone = self.gone[name] = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        request = Request({"type": "http", "headers": [], "client": (name[0], 1)}, receive)
        return self.work.run(request, lambda: self._do(name))

    async def begin(self, *names: str) -> list[asyncio.Task[str]]:
        tasks = [asyncio.ensure_future(self.run(name)) for name in names]
        await asyncio.sleep(0)
        return tasks  # type: ignore[return-value]


def scenario(max_waiting: int) -> Callable[[Callable[[Bench], Awaitable[None]]], Bench]:
    def play(act: Callable[[Bench], Awaitable[None]]) -> Bench:
        async def run() -> Bench:
            bench = Bench(max_waiting)
            try:
                await act(bench)
            finally:
                bench.opened.set()
            return bench

        return asyncio.run(run())

    return play


def test_callers_take_turns_and_each_has_half_of_the_line() -> None:
    async def act(bench: Bench) -> None:
        tasks = await bench.begin("a0", "a1", "a2", "a3", "a4")
        with pytest.raises(CapacityError, match="4 texts of this caller"):
            await bench.run("a5")
        tasks += await bench.begin("b0", "b1", "c0", "b2")
        with pytest.raises(CapacityError, match="8 texts wait"):
            await bench.run("d0")
        bench.opened.set()
        await asyncio.gather(*tasks)
        await bench.run("d1")

    assert scenario(8)(act).ran == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "b2", "a4", "d1"]


def test_a_client_that_leaves_or_is_cancelled_gives_its_turn_up() -> None:
    async def act(bench: Bench) -> None:
        a0, a1, b0, b1, a2 = await bench.begin("a0", "a1", "b0", "b1", "a2")
        bench.gone["b0"].set()
        with pytest.raises(ClientGone):
            await b0
        a1.cancel()
        with pytest.raises(asyncio.CancelledError):
            await a1
        bench.opened.set()
        assert [await a0, await b1, await a2] == ["a0", "b1", "a2"]
        assert await bench.run("c0") == "c0"

    assert scenario(8)(act).ran == ["a0", "a2", "b1", "c0"]


def test_a_caller_is_a_key_or_an_address_or_a_network() -> None:
    def caller(address: str, *keys: str, key: str = "") -> str:
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        return Gate(keys).caller_of(Request({"type": "http", "headers": headers, "client": (address, 1)}))

    assert caller("10.0.0.1") == "10.0.0.1"
    assert caller("2001:db8::1") == caller("2001:db8::2") != caller("2001:db8:0:1::1")
    assert caller("10.0.0.1", "one", "two", key="one") == caller("10.0.0.2", "one", "two", key="one")
    assert caller("10.0.0.1", "one", key="one") == "10.0.0.1"
