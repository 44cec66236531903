"""Work that takes a core for milliseconds is done on threads of its own, a few pieces at a time, in fair turns.

The event loop runs meanwhile. Callers take turns, each with its own pieces in order of arrival, and none has more than
half of the places in line: the others wait for one piece of a caller that sends hundreds. A request whose client leaves
before its turn gives the turn up.

::

    waiting    a a a a a      turns    a b c a b a a a
               b b
               c
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from manylora.errors import CapacityError, ManyloraError
from manylora.server.lines import Lines

__all__ = ["ClientGone", "FairWork"]

T = TypeVar("T")


class ClientGone(ManyloraError):
    """The client disconnected."""

    status = 499


class FairWork:
    """The turns of one kind of work. For the event loop's thread alone.

    Args:
        things: The kind of pieces, for messages.
        caller_of: Returns the caller of a request, by whom turns are shared.
        max_waiting: Pieces that wait; more get a 429. One caller has half of them at most.
        num_at_once: Pieces at once; by default half of the processors, at most four.
    """

    def __init__(
        self, things: str, caller_of: Callable[[Request], str], *, max_waiting: int, num_at_once: int | None = None
    ) -> None:
        at_once = min(4, max(1, (os.cpu_count() or 2) // 2)) if num_at_once is None else num_at_once
        self._things = things
        self._caller_of = caller_of
        self._max_waiting = max_waiting
        self._num_free = at_once
        self._num_waiting = 0
        self._lines: Lines[asyncio.Future[None]] = Lines()
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="fair-work")

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread when it is the request's turn.

        Raises:
            CapacityError: Too many wait (429).
            ClientGone: The client disconnected before its turn.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            await self._turn(request)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._give()

    async def _turn(self, request: Request) -> None:
        """Wait for a turn, or for the client to leave."""
        if self._num_waiting >= self._max_waiting:
            raise CapacityError(f"{self._num_waiting} {self._things} wait, the most allowed")
        caller = self._caller_of(request)
        num_of_caller = self._lines.num_of(caller)
        if num_of_caller >= max(1, self._max_waiting // 2):
            raise CapacityError(f"{num_of_caller} {self._things} of this caller wait, the most allowed")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.put(caller, turn)
        self._num_waiting += 1
        gone = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone("the client disconnected")
        except BaseException:
            if turn.done():
                self._give()
            else:
                self._lines.remove(caller, turn)
                self._num_waiting -= 1
            raise
        finally:
            gone.cancel()

    def _give(self) -> None:
        """Give the turn to the next caller's first piece, if there is one."""
        if not self._lines:
            self._num_free += 1
            return
        _, turn = self._lines.take()
        self._num_waiting -= 1
        turn.set_result(None)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
