"""Long texts take turns; a client that leaves gives its turn up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.requests import Request

from manylora.errors import CapacityError
from manylora.server import text_work
from manylora.server.text_work import ClientGone, TextWork


def request(gone: asyncio.Event) -> Request:
    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


def test_turns_are_in_order_and_a_client_that_leaves_gives_its_turn_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_work, "MAX_TEXT_WAITING", 3)

    async def scenario() -> list[str]:
        work, opened, ran = TextWork(1), threading.Event(), []
        gone = {name: asyncio.Event() for name in "abcde"}

        def job(name: str) -> str:
            opened.wait()
            ran.append(name)
            return name

        tasks = {}
        for name in "abcd":
            tasks[name] = asyncio.create_task(work.run(request(gone[name]), lambda name=name: job(name)))
            await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await work.run(request(gone["e"]), lambda: "e")
        gone["c"].set()
        with pytest.raises(ClientGone):
            await tasks["c"]
        opened.set()
        assert [await tasks[name] for name in "abd"] == ["a", "b", "d"]
        assert await work.run(request(gone["e"]), lambda: "e") == "e"
        return ran

    assert asyncio.run(scenario()) == ["a", "b", "d"]
