"""One HTTP/1.1 connection to a backend.

httptools (llhttp) parses answers. The body's pieces of one read go to the receiver in one call, from the event loop's
callback: no task wakes for a piece of a stream. An answer is not decoded and not framed anew.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, cast

import httptools

__all__ = ["MAX_HEAD_BYTES", "STALE_S", "Failure", "Headers", "Receiver", "UpstreamConnection"]

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of an answer between two pieces of its body: status line and headers, chunk extensions, trailers."""
STALE_S = 1.0  # time within which the end of an idle connection is noticed by a request that is sent on it, in seconds

Headers = list[tuple[bytes, bytes]]


class Failure(Enum):
    """The reason why an exchange ended without a whole answer."""

    CONNECT = "connect"  # no connection: refused, unreachable, no such name, too slow
    LOST = "lost"  # the connection ended before the answer did
    STALE = "stale"
    """A connection with earlier exchanges ended at once, before any byte: the backend may have closed it before."""
    ILLEGAL = "illegal"  # the answer is not HTTP, or its head is too large
    STALLED = "stalled"  # no byte of the body came within its time limit
    DOWN = "down"  # the backend is out, by its health, while the request waited for it
    CANCELLED = "cancelled"  # the client is gone


class Receiver(Protocol):
    """Takes an answer in parts, in this order; nothing follows ``ended`` or ``failed``."""

    def head(self, status: int, headers: Headers) -> None:
        """Take the status and the headers, names in lower case."""

    def body(self, piece: bytes) -> None:
        """Take bytes of the body."""

    def ended(self) -> None:
        """The answer is whole."""

    def failed(self, failure: Failure) -> None:
        """The answer is not whole."""


@dataclass(eq=False)
class UpstreamConnection(asyncio.Protocol):
    """A connection that serves one exchange at a time."""

    # Called when an exchange has ended and the connection can serve another.
    on_idle: Callable[[UpstreamConnection], None]
    on_closed: Callable[[UpstreamConnection], None]  # called when the connection is closed
    # Called when the backend sent bytes behind an answer, before the connection is closed.
    on_surplus: Callable[[], None]
    _receiver: Receiver | None = None
    _pieces: list[bytes] = field(default_factory=list)
    _headers: Headers = field(default_factory=list)
    _num_bare_bytes: int = 0
    num_exchanges: int = 0
    idle_since: float = 0.0

    def is_quiet(self) -> bool:
        """Whether nothing came behind the last answer, not even bytes that the event loop has yet to read.

        Such bytes would be taken for the answer to the next request; the end of the connection shows as well.
        """
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def begin(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        """Send a request; the receiver gets its answer."""
        assert self._receiver is None
        self._receiver = receiver
        self.num_exchanges += 1
        self._began_at = asyncio.get_running_loop().time()
        self._begin_answer()
        self._is_paused = False
        self._transport.writelines((head, body) if body else (head,))

    def pause(self) -> None:
        """Stop to read, so that the backend is held up as the client is."""
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused:
            self._is_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def cancel(self, failure: Failure = Failure.CANCELLED) -> None:
        """End the exchange and close the connection, which tells the backend to stop."""
        self._transport.abort()
        self._fail(failure)

    def close(self) -> None:
        """Close the connection."""
        self._transport.abort()

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        """Parse, and hand on the pieces of the body."""
        receiver = self._receiver
        if receiver is None:  # bytes without a request
            self.on_surplus()
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._is_whole:
                self.cancel(Failure.ILLEGAL)
                return
            self._has_surplus = True
        self._num_bare_bytes = 0 if self._pieces else self._num_bare_bytes + len(data)
        if self._num_bare_bytes > MAX_HEAD_BYTES and not self._is_whole:
            self.cancel(Failure.ILLEGAL)
            return
        if self._receiver is None:  # cancelled by the receiver itself, on the head
            return
        if self._pieces:
            pieces = self._pieces
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            receiver.body(piece)
        if self._is_whole and self._receiver is receiver:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: whole, if its answer goes on to the end of the connection."""
        self.on_closed(self)
        if self._receiver is not None:
            if exc is None and self._has_head and self._is_until_close:
                self._end()
            else:
                self._fail(Failure.STALE if self._is_stale() else Failure.LOST)

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Refuse a second answer: one request was sent, and the next client must not get it."""
        if self._is_whole:
            raise ValueError("A second answer follows the first one")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        if not self._has_head:  # trailers are dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Hand on the head of the answer; interim answers are left out."""
        status = self._parser.get_status_code()
        if status < 200 and status != 101:
            return
        headers, self._headers = self._headers, []
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES or not 200 <= status < 600:
            raise ValueError("The head is too large, or the status is none of an answer")
        self._has_head = True
        names = {name for name, _ in headers}
        self._is_until_close = b"content-length" not in names and b"transfer-encoding" not in names
        assert self._receiver is not None
        self._receiver.head(status, headers)

    def on_body(self, piece: bytes) -> None:
        """Keep a piece until the read is parsed."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the answer; an interim answer is followed by the real answer."""
        if self._has_head:
            self._is_whole = True
            self._keeps_alive = self._parser.should_keep_alive()  # the parser forgets it behind this call
        else:
            self._headers.clear()

    def _begin_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._is_whole = self._is_until_close = self._keeps_alive = self._has_surplus = False
        self._num_bare_bytes = 0
        self._headers.clear()
        self._pieces.clear()

    def _end(self) -> None:
        receiver, self._receiver = self._receiver, None
        assert receiver is not None
        is_sent = not self._transport.get_write_buffer_size()  # else an early answer: the request goes no further
        if self._has_surplus:
            self.on_surplus()
        if self._keeps_alive and is_sent and not self._has_surplus and not self._transport.is_closing():
            self.resume()
            self.on_idle(self)
        else:
            self._transport.abort()
        receiver.ended()

    def _is_stale(self) -> bool:
        is_at_once = asyncio.get_running_loop().time() - self._began_at < STALE_S
        return self.num_exchanges > 1 and not (self._has_head or self._num_bare_bytes) and is_at_once

    def _fail(self, failure: Failure) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.failed(failure)
