"""Viewers of the live page: one snapshot a second for all of them, as server-sent events.

The snapshot is taken once, however many watch, and never while none does. A viewer holds one snapshot at most: a newer
one takes its place. A client that has not taken one for ``MOST_MISSED`` in a row is dropped, and so is the connection
of every viewer after ``STREAM_S``: the page opens another, for which its session must still be valid.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias

from starlette.types import Receive, Scope, Send

from manylora.core.errors import CapacityError
from manylora.serving.http.http_protocol import connection_breaker
from manylora.serving.http.turns import until_gone

__all__ = ["Viewers"]

MAX_VIEWERS = 32
MOST_MISSED = 5
STREAM_S = 600.0
EVERY_S = 1.0

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Viewer:
    """One stream: the snapshot that its client has not taken, if any."""

    waiting: bytes = b""
    num_missed: int = 0
    is_ended: bool = False
    is_slow: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, event: bytes) -> None:
        """Let the client have an event in place of the one before; a client that takes none is slow."""
        self.num_missed = self.num_missed + 1 if self.waiting else 0
        self.is_slow = self.num_missed >= MOST_MISSED
        self.waiting = event
        self.changed.set()

    def end(self) -> None:
        """Let the stream end after what waits."""
        self.is_ended = True
        self.changed.set()

    async def next(self) -> bytes:
        """Return the next event; empty once the stream has ended."""
        while not (self.waiting or self.is_ended):
            self.changed.clear()
            await self.changed.wait()
        event, self.waiting = self.waiting, b""
        return event


@dataclass(eq=False)
class Viewers:
    """Sends snapshots to all who watch. For the event loop's thread alone."""

    take: Callable[[], Awaitable[bytes]]  # takes a snapshot, as JSON in one line
    # Returns whether the server ends: each viewer then gets one snapshot, and no stream stays open.
    is_ending: Callable[[], bool]
    _: KW_ONLY
    most: int = MAX_VIEWERS  # viewers at once
    every_s: float = EVERY_S  # time between two snapshots, in seconds
    _streams: dict[_Viewer, asyncio.Task[None]] = field(default_factory=dict)
    _last: bytes = b""
    _running: asyncio.Task[None] | None = None

    def check_room(self) -> None:
        """Raise ``CapacityError`` (503) if as many watch as may."""
        if len(self._streams) >= self.most:
            message = f"{len(self._streams)} pages are open, of {self.most} at most: close one"
            raise CapacityError(message, retry_after_s=5.0, status=503)

    async def send_to(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """Answer one more viewer: an ASGI application, after ``check_room``."""
        viewer = _Viewer(waiting=self._last)
        sending = asyncio.create_task(_send(viewer, send, headers))
        gone = asyncio.create_task(until_gone(receive))
        ending = asyncio.get_running_loop().call_later(STREAM_S, viewer.end)
        self._streams[viewer] = sending
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._streams[viewer]
            ending.cancel()
            for task in (sending, gone):
                task.cancel()
            if viewer.is_slow:
                connection_breaker(scope)()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _run(self) -> None:
        """Take snapshots until the last viewer has left."""
        try:
            while self._streams:
                self._last = b"data: " + await self.take() + b"\n\n"
                for viewer, sending in self._streams.items():
                    viewer.offer(self._last)
                    if viewer.is_slow:
                        sending.cancel()
                    elif self.is_ending():
                        viewer.end()
                await asyncio.sleep(self.every_s)
        except Exception:  # a bug in one part must not leave pages that seem to live
            logger.exception("page_snapshot_failed")
        finally:
            self._last = b""
            for viewer in self._streams:
                viewer.end()


async def _send(viewer: _Viewer, send: Send, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    event = b"retry: 2000\n\n"
    while event:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        event = await viewer.next()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
