"""Many streams at once, and a disturbance in the middle of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from manylora.serving.server import BackgroundServer


async def answers(
    url: str, bodies: Sequence[dict[str, Any]], disturb: Callable[[Sequence[asyncio.Event]], Awaitable[None]]
) -> list[str]:
    """Stream all answers at once and return their texts; ``disturb`` gets an event for the first token of each."""
    begun = [asyncio.Event() for _ in bodies]

    async def stream(client: httpx.AsyncClient, index: int) -> str:
        text, finish, last = "", None, ""
        async with client.stream("POST", "/v1/completions", json={**bodies[index], "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text, finish = text + choice["text"], choice["finish_reason"]
                    begun[index].set()
        assert finish is not None
        assert last == "data: [DONE]"
        return text

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits()) as client:
        streams = [asyncio.create_task(stream(client, index)) for index in range(len(bodies))]
        await disturb(begun)
        return await asyncio.gather(*streams)


async def leave_alone(begun: Sequence[asyncio.Event]) -> None:
    pass


def replicas_of(server: BackgroundServer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{server.url}/status", timeout=60).json()["replicas"]
    return rows
