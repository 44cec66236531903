"""A run of `fleet_chaos.py`: its parts, its account, its requests as their clients see them, and routed adapters.

Some adapters are replaced in place and unloaded through the router. A change that was answered with 200 holds for every
request that is sent afterwards: it gets that version or an error, and an error after an unload. While a change is under
way, and after one that failed, both versions may be served. A router that starts knows no change: any version may be
served until the next one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from fleet_rig import Clock, Command, Disk, Link

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


class RoutedAdapters:
    """Changes adapters through a router, and knows their versions.

    Args:
        router: Started with `--manage-adapters`.
        folder: Of the versions, a folder each.
        versions: Contents that the adapters have by turns.
    """

    def __init__(self, router: Command, folder: Path, versions: Sequence[str]) -> None:
        self.names = [f"routed-{index}" for index in range(len(versions))]
        self.answers: Counter[str] = Counter()
        self._router = router
        self._folder = folder
        self._versions = versions
        self._possible: dict[str, list[str]] = {name: [] for name in self.names}

    def versions_of(self, name: str) -> Sequence[str]:
        """Return the versions that a request sent now may get; those of later changes are added while it runs."""
        return self._possible[name]

    def forget(self) -> None:
        """Learn that the router was started: its book is empty."""
        for possible in self._possible.values():
            possible.extend(self._versions)

    async def change(self, session: aiohttp.ClientSession, name: str, version: str | None) -> int:
        """Replace an adapter by a version, or unload it; return the status, 0 if the connection broke."""
        body: dict[str, object] = {"lora_name": name}
        if version is not None:
            self._possible[name].append(version)
            body |= {"lora_path": str(self._folder / version), "load_inplace": True}
        verb, began, status = ("unload" if version is None else "load"), time.monotonic(), 0
        try:
            async with session.post(f"{self._router.url}/v1/{verb}_lora_adapter", json=body) as answer:
                await answer.read()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        self.answers[f"{verb} through the router {status or 'cut'}"] += 1
        if status == 200 and not self._router.was_away(began, time.monotonic()):
            self._possible[name] = [] if version is None else [version]
        return status

    async def churn(self, session: aiohttp.ClientSession, rng: Random, is_over: Callable[[], bool]) -> None:
        """Change one adapter after another."""
        while not is_over():
            version = None if rng.random() < 0.25 else rng.choice(self._versions)
            await self.change(session, rng.choice(self.names), version)
            await asyncio.sleep(rng.expovariate(1.0))


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
