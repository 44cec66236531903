"""Turns of callers: work that takes milliseconds is shared out, on threads and on the event loop.

Each caller has a queue of its own, in order of arrival, and the callers take turns.

``FairWork``: work that takes a core for milliseconds runs on threads of its own, a few pieces at a time, and the event
loop runs meanwhile. No caller has more than half of the places: others wait for one piece of a caller that sends
hundreds. A request whose client leaves before its turn gives the turn up::

    queues     a a a a a      turns    a b c a b a a a
               b b
               c

``LoopTurns``: requests that need the event loop for milliseconds share a part of each of its passes. A request gives
the loop back after each piece of a millisecond or two, but the loop resumes every waiting request in each pass, so
hundreds at once would still hold it for the sum of their pieces. So a request waits for a turn before a piece. In each
pass as many pieces run as take ``SHARE_S`` together; sockets, tokens and short requests come between. A piece that took
several shares is followed by as many passes for others, which need a few for a new connection and its first answer::

    pass     | sockets, tokens | a b | sockets, tokens | c a | sockets, tokens | a |
    queues   a a a, b, c         a a, c                  a
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from manylora.core.errors import CapacityError, ManyloraError
from manylora.core.machine import count_cores

__all__ = ["CallerQueues", "ClientGone", "FairWork", "LoopTurns", "next_turn", "until_gone"]

T = TypeVar("T")


class CallerQueues(Generic[T]):
    """Items that wait, by caller; false if none does. To put and to take one costs the same however many wait."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}  # none empty; the queue of the next turn first

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, queue by queue."""
        return (item for queue in self._queues.values() for item in queue)

    def num_of(self, caller: str) -> int:
        """Return how many items of a caller wait."""
        return len(self._queues.get(caller, ()))

    def put(self, caller: str, item: T) -> None:
        """Add an item at the end of its caller's queue."""
        self._queues.setdefault(caller, deque()).append(item)

    def take(self) -> tuple[str, T]:
        """Remove the next item and return it after its caller, whose turn is now last. There must be an item."""
        caller = next(iter(self._queues))
        queue = self._queues.pop(caller)
        item = queue.popleft()
        if queue:
            self._queues[caller] = queue
        return caller, item

    def remove(self, caller: str, item: T) -> None:
        """Remove an item that waits."""
        queue = self._queues[caller]
        queue.remove(item)
        if not queue:
            del self._queues[caller]

    def clear(self) -> None:
        """Remove all items."""
        self._queues.clear()


class ClientGone(ManyloraError):
    """The client disconnected."""

    status = 499


@dataclass(eq=False)
class FairWork:
    """The turns of one kind of work. For the event loop's thread alone."""

    things: str  # the kind of pieces, for messages
    caller_of: Callable[[Request], str]  # returns the caller of a request, by whom turns are shared
    _: KW_ONLY
    max_waiting: int  # pieces that wait; more get a 429. One caller has half of them at most
    num_at_once: int | None = None  # pieces at once; by default half of the processors, at most four
    _num_waiting: int = 0
    _queues: CallerQueues[asyncio.Future[None]] = field(default_factory=CallerQueues)

    def __post_init__(self) -> None:
        self._num_free = self.num_at_once or min(4, max(1, count_cores() // 2))
        self._threads = ThreadPoolExecutor(self._num_free, thread_name_prefix="fair-work")

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread when it is the request's turn.

        ``CapacityError`` (429) if too many wait; ``ClientGone`` if the client disconnected before its turn.
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
        if self._num_waiting >= self.max_waiting:
            raise CapacityError(f"{self._num_waiting} {self.things} wait, the most allowed")
        caller = self.caller_of(request)
        num_of_caller = self._queues.num_of(caller)
        if num_of_caller >= max(1, self.max_waiting // 2):
            raise CapacityError(f"{num_of_caller} {self.things} of this caller wait, the most allowed")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.put(caller, turn)
        self._num_waiting += 1
        gone = asyncio.create_task(until_gone(request.receive))
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone("the client disconnected")
        except BaseException:
            if turn.done():
                self._give()
            else:
                self._queues.remove(caller, turn)
                self._num_waiting -= 1
            raise
        finally:
            gone.cancel()

    def _give(self) -> None:
        """Give the turn to the next caller's first piece, if there is one."""
        if not self._queues:
            self._num_free += 1
            return
        _, turn = self._queues.take()
        self._num_waiting -= 1
        turn.set_result(None)


async def until_gone(receive: Receive) -> None:
    """Wait until the client of a request has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


SHARE_S = 0.002  # time of a pass for pieces of requests; one piece may take longer
MOST_RESTS = 16  # passes without pieces after one that took long. An empty pass takes some 50 microseconds
MOST_AT_ONCE = 64  # pieces that are resumed in one pass, however short the last ones were


class LoopTurns:
    """The turns on one event loop. For that loop's thread alone."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._queues: CallerQueues[asyncio.Future[None]] = CallerQueues()
        self._is_counting = False  # a callback for the next pass is due
        self._began_s = 0.0  # of the pieces of this pass
        self._num_at_once = 1
        self._num_rests = 0  # passes for others, before the next piece

    def enter(self, caller_of: Callable[[], str]) -> None:
        """Let the running task, and those that it creates, take turns here.

        ``caller_of`` returns the caller by whom turns are shared; it is called if the task has to wait.
        """
        _entered.set((self, caller_of))

    async def wait(self, caller_of: Callable[[], str]) -> None:
        """Return at once while there is time left in this pass and none waits, else at the caller's turn."""
        if not self._queues:
            if not self._is_counting:
                self._is_counting = True
                self._began_s = self._now_s()
                asyncio.get_running_loop().call_soon(self._next_pass)
                return
            if self._now_s() - self._began_s < SHARE_S:
                return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.put(caller_of(), turn)
        await turn

    def _next_pass(self) -> None:
        """Resume the next pieces, between two looks at the time."""
        call_soon = asyncio.get_running_loop().call_soon
        if not self._queues:
            self._is_counting = False
            return
        if self._num_rests:
            self._num_rests -= 1
            call_soon(self._next_pass)
            return
        call_soon(self._begin)
        num = 0
        while num < self._num_at_once and self._queues:
            _, turn = self._queues.take()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                num += 1
        call_soon(self._end, num)

    def _begin(self) -> None:
        self._began_s = self._now_s()

    def _end(self, num: int) -> None:
        """Learn how many pieces fit into a pass."""
        took_s = max(1e-6, self._now_s() - self._began_s)
        self._num_at_once = min(MOST_AT_ONCE, max(1, int(num * SHARE_S / took_s)))
        self._num_rests = min(MOST_RESTS, int(took_s / SHARE_S))
        self._next_pass()


_entered: ContextVar[tuple[LoopTurns, Callable[[], str]] | None] = ContextVar("entered", default=None)


async def next_turn() -> None:
    """Wait for the next turn of the running request; outside of requests, let others run once."""
    entered = _entered.get()
    if entered is None:
        await asyncio.sleep(0)
    else:
        turns, caller_of = entered
        await turns.wait(caller_of)
