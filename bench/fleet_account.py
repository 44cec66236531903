"""A run of `fleet_chaos.py`: its parts, its account, and its requests as their clients see them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from fleet_rig import Clock, Command, Disk, Link
from fleet_routed import RoutedAdapters

__all__ = ["Asked", "Chaos", "Key", "ask"]

Key = tuple[str, int | None]
"""What an answer depends on: the content of the adapter, and the seed."""


@dataclass
class Asked:
    """A request, and its end as the client saw it; times are monotonic seconds."""

    way: Command
    contents: Sequence[str]
    seed: int | None
    num_tokens: int
    began: float
    ended: float = 0.0
    status: int = 0
    text: str = ""
    usage: int | None = None
    error: str = ""
    broken: str = ""
    has_left: bool = False
    is_whole: bool = False


@dataclass
class Chaos:
    """The run: its parts, and its account."""

    servers: list[Command]
    router: Command
    routed: RoutedAdapters
    links: list[Link]
    disk: Disk
    clock: Clock
    folder: Path
    rng: Random
    began: float = 0.0
    ends_at: float = 0.0
    expected: dict[Key, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    admin: Counter[str] = field(default_factory=Counter)
    signalled: set[int] = field(default_factory=set)
    """Processes of engines that were killed or stopped."""
    violations: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_at

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            print(f"violated: {text}", flush=True)
            self.violations.append(text)


async def ask(session: aiohttp.ClientSession, asked: Asked, model: str, *, leaves_after: int | None = None) -> Asked:
    """Send a request and read its answer, whatever it is."""
    body: dict[str, Any] = {"model": model, "prompt": "the birds", "max_tokens": asked.num_tokens, "ignore_eos": True}
    body |= {"temperature": 0.0} if asked.seed is None else {"temperature": 0.9, "seed": asked.seed}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{asked.way.url}/v1/completions", json=body) as answer:
            asked.status = answer.status
            if answer.status != 200:
                asked.error = (await answer.json())["error"]["message"]
            async for line in answer.content:
                if answer.status == 200 and line.startswith(b"data: "):
                    take(asked, line[6:].strip())
                if leaves_after is not None and len(asked.text) >= leaves_after:
                    asked.has_left = True
                    break
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
        asked.broken = repr(error)[:200]
    asked.ended = time.monotonic()
    return asked


def take(asked: Asked, content: bytes) -> None:
    """Take an event of a stream."""
    if content == b"[DONE]":
        asked.is_whole = not asked.error
        return
    event = json.loads(content)
    if "error" in event:
        asked.error = event["error"]["message"] or "an error without a message"
    elif event["choices"]:
        asked.text += event["choices"][0]["text"]
    if event.get("usage"):
        asked.usage = event["usage"]["completion_tokens"]
