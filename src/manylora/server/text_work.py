"""Long texts are tokenized on threads, a few at a time and in order of arrival.

The tokenizer lets the event loop run meanwhile, but takes memory and a core. A request whose client leaves before its
turn gives the turn up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from manylora.errors import CapacityError, ManyloraError
from manylora.server.bounds import MAX_TEXT_WAITING

__all__ = ["ClientGone", "TextWork"]

T = TypeVar("T")


class ClientGone(ManyloraError):
    """The client disconnected."""

    status = 499


class TextWork:
    """The turns of long texts. For the event loop's thread alone.

    Args:
        num_at_once: Texts at once; by default half of the processors, at most four.
    """

    def __init__(self, num_at_once: int | None = None) -> None:
        at_once = min(4, max(1, (os.cpu_count() or 2) // 2)) if num_at_once is None else num_at_once
        self._turns = asyncio.Semaphore(at_once)
        self._num_waiting = 0

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread when it is the request's turn.

        Raises:
            CapacityError: Too many texts wait (429).
            ClientGone: The client disconnected before its turn.
        """
        if not self._turns.locked():
            async with self._turns:
                return await asyncio.to_thread(work)
        if self._num_waiting >= MAX_TEXT_WAITING:
            raise CapacityError(f"{self._num_waiting} long texts wait to be tokenized, the most allowed")
        self._num_waiting += 1
        try:
            await self._turn(request)
        finally:
            self._num_waiting -= 1
        try:
            return await asyncio.to_thread(work)
        finally:
            self._turns.release()

    async def _turn(self, request: Request) -> None:
        """Wait for a turn, or for the client to leave."""
        turn = asyncio.create_task(self._turns.acquire())
        gone = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and turn.done():
                self._turns.release()
            if gone.done():
                raise ClientGone("the client disconnected")
        finally:
            gone.cancel()
            turn.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
