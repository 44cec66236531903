"""Adapters of `fleet_chaos.py` that are replaced in place and unloaded through the router, and the versions of them.

A change that was answered with 200 holds for every request that is sent afterwards: it gets that version or an error,
and an error after an unload. While a change is under way, and after one that failed, both versions may be served. A
router that starts knows no change: any version may be served until the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import aiohttp
from fleet_rig import Command

__all__ = ["RoutedAdapters"]


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
