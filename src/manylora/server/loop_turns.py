"""Turns on the event loop: requests that need it for milliseconds share a part of each of its passes.

A request gives the loop back after each piece of a millisecond or two. Hundreds of requests at once would still hold it
for the sum of their pieces, since the loop resumes every one of them in each pass. So a request waits for a turn before
a piece. In each pass as many pieces run as take ``SHARE_S`` together, and callers take turns; sockets, tokens and short
requests come between. A piece that took several shares is followed by as many passes for others, which need a few for a
new connection and its first answer.

::

    pass     | sockets, tokens | a b | sockets, tokens | c a | sockets, tokens | a |
    lines    a a a, b, c         a a, c                  a
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar

from manylora.server.lines import Lines

__all__ = ["LoopTurns", "next_turn"]

SHARE_S = 0.002
"""Time of a pass for pieces of requests; one piece may take longer."""

MOST_RESTS = 16
"""Passes without pieces after one that took long. An empty pass takes some 50 microseconds."""

MOST_AT_ONCE = 64
"""Pieces that are resumed in one pass, however short the last ones were."""


class LoopTurns:
    """The turns on one event loop. For that loop's thread alone.

    Args:
        now_s: Returns a time in seconds that never steps back.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._lines: Lines[asyncio.Future[None]] = Lines()
        self._is_counting = False  # a callback for the next pass is due
        self._began_s = 0.0  # of the pieces of this pass
        self._num_at_once = 1
        self._num_rests = 0  # passes for others, before the next piece

    def enter(self, caller_of: Callable[[], str]) -> None:
        """Let the running task, and those that it creates, take turns here.

        Args:
            caller_of: Returns the caller by whom turns are shared; called if the task has to wait.
        """
        _entered.set((self, caller_of))

    async def wait(self, caller_of: Callable[[], str]) -> None:
        """Return at once while there is time left in this pass and none waits, else at the caller's turn."""
        if not self._lines:
            if not self._is_counting:
                self._is_counting = True
                self._began_s = self._now_s()
                asyncio.get_running_loop().call_soon(self._next_pass)
                return
            if self._now_s() - self._began_s < SHARE_S:
                return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.put(caller_of(), turn)
        await turn

    def _next_pass(self) -> None:
        """Resume the next pieces, between two looks at the time."""
        call_soon = asyncio.get_running_loop().call_soon
        if not self._lines:
            self._is_counting = False
            return
        if self._num_rests:
            self._num_rests -= 1
            call_soon(self._next_pass)
            return
        call_soon(self._begin)
        num = 0
        while num < self._num_at_once and self._lines:
            _, turn = self._lines.take()
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
