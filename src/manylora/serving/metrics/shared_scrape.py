"""Scrapes that come together share one: a flood of ``GET /metrics`` must not keep the engines at counting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["SharedScrape"]


class SharedScrape:
    """Runs scrapes one after another; all that come while one runs share the next.

    No scrape is given a result that was begun before it came, so it has all that happened before. A run that waited for
    the one before waits as long again, so that a flood of scrapes takes half of the time at most.

    ::

        run      |---- 1 ----|           |---- 2 ----|
        comes    a    b  c                    d           a gets 1, b and c get 2, d gets 3
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def get(self, scrape: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the result of a run of ``scrape`` that begins from now on; its errors are raised here."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(scrape, self._running))
        return await asyncio.shield(self._next)  # a client that leaves does not end it for the others

    async def _run(self, scrape: Callable[[], Awaitable[bytes]], before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None and not before.done():
            loop = asyncio.get_running_loop()
            came_at = loop.time()
            await asyncio.wait([before])
            await asyncio.sleep(loop.time() - came_at)
        self._running, self._next = self._next, None
        return await scrape()
