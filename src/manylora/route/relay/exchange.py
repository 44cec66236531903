"""One attempt of a request at one backend, and the bytes of its answer on their way to the client.

Bytes are held until the first of the body are there: up to then the request can go to another backend. From then on
each read is written to the client from the callback that read it. When the client does not keep up, the rest is held
and the backend's connection is not read, until the client has taken it.
"""

from __future__ import annotations

import asyncio

from manylora.route.backend import Backend
from manylora.route.upstream.connection import Failure, Headers, UpstreamConnection
from manylora.serving.http.http_protocol import WriteChunk

__all__ = ["Exchange"]

MAX_HELD_BYTES = 256 * 1024
"""Bytes of a body that are held before the backend's connection is no longer read."""


class Exchange:
    """One attempt of a request at a backend: receives the answer and passes it on.

    Args:
        backend: Where the request was sent.
        first_byte_s: Time to the first byte of the body, in seconds.
        idle_s: Time between two pieces of the body, in seconds.
    """

    def __init__(self, backend: Backend, *, first_byte_s: float, idle_s: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self.failure: Failure | None = None
        self.is_whole = False
        self.last = b""
        """The last piece, for the end of a stream that breaks off."""
        self.is_backend_silent = False
        """Whether the backend sent nothing to any other request either, within the time limit that this attempt met."""
        self._first_byte_s = first_byte_s
        self._idle_s = idle_s
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._backend = backend
        self._connection: UpstreamConnection | None = None
        self._pieces: list[bytes] = []
        self._num_held = 0
        self._write: WriteChunk | None = None
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()

    @property
    def has_body(self) -> bool:
        """Whether bytes of the body came."""
        return bool(self.last)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.is_whole or self.failure is not None

    def begin(self, connection: UpstreamConnection, head: bytes, body: bytes) -> None:
        """Send the request."""
        self._connection = connection
        self._backend.at_work.add(connection)
        self._progress()
        self._timer = self._loop.call_later(self._first_byte_s, self._look)
        connection.begin(self, head, body)

    def cancel(self, failure: Failure = Failure.CANCELLED) -> None:
        """End the attempt; the backend is told by the end of the connection."""
        if self.is_over:
            return
        if self._connection is None:
            self.failed(failure)
        else:
            self._connection.cancel(failure)

    async def started(self) -> None:
        """Wait for the first bytes of the body, or the end without any."""
        while not (self.last or self.is_over):
            await self._change()

    def write_to(self, write: WriteChunk) -> None:
        """Write the pieces that are held, and from now on every piece as it comes."""
        self._write = write

    def held(self) -> list[bytes]:
        """Take the pieces that are held, to be sent by a call that waits for the client."""
        pieces, self._pieces = self._pieces, []
        self._num_held = 0
        return pieces

    async def more(self) -> None:
        """Read on, and wait until pieces are held or the answer is over."""
        if self._connection is not None and not self.is_over:
            self._connection.resume()
            if self._is_paused:
                self._is_paused = False
                self._progress()  # until now the client was waited for
        while not (self._pieces or self.is_over):
            await self._change()

    # -- receiver ----------------------------------------------------------------------------------------------------

    def head(self, status: int, headers: Headers) -> None:
        """Keep the head."""
        self._backend.num_reads += 1
        self.status, self.headers = status, headers

    def body(self, piece: bytes) -> None:
        """Write a piece, or hold it."""
        self._backend.num_reads += 1
        if self.status < 400:
            self._backend.num_pieces += 1
        self._progress()
        if self._timer is not None and not self.last:
            self._timer.cancel()
            self._timer = self._loop.call_later(self._idle_s, self._look)
        self.last = piece
        if self._write is not None and not self._pieces and self._write(piece):
            return
        self._pieces.append(piece)
        self._num_held += len(piece)
        if self._connection is not None and (self._write is not None or self._num_held > MAX_HELD_BYTES):
            self._is_paused = True
            self._connection.pause()
        self._wake()

    def ended(self) -> None:
        """The answer is whole."""
        self.is_whole = True
        self._over()

    def failed(self, failure: Failure) -> None:
        """The answer broke off, or did not come."""
        self.failure = failure
        self._over()

    def _over(self) -> None:
        if self._connection is not None:
            self._backend.at_work.discard(self._connection)
            self._connection = None
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _progress(self) -> None:
        self._progress_at = self._loop.time()
        self._num_pieces_seen = self._backend.num_pieces

    def _look(self) -> None:
        """End the attempt if it has met its time limit; the client's time is not counted."""
        limit_s = self._idle_s if self.last else self._first_byte_s
        left_s = limit_s if self._is_paused else self._progress_at + limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self.is_backend_silent = self._backend.num_pieces == self._num_pieces_seen
        self.cancel(Failure.STALLED)

    def _wake(self) -> None:
        if not self._changed.done():
            self._changed.set_result(None)

    async def _change(self) -> None:
        await self._changed
        self._changed = self._loop.create_future()
