"""uvicorn's HTTP/1.1 protocol, with bounds on a connection, refusals and chunks that need no task.

Bounds hold before a request is parsed: connections in all and by address, bytes and number of headers, bytes that are
no part of a head or a body (chunk sizes and extensions, trailers, empty lines), the time until the headers and the body
have arrived, and requests that wait for the answer before theirs. A request that comes in one piece, as nearly all do,
pays a few comparisons.

An answer that comes before the end of its request's body, such as a 413, would be lost: a connection that is closed
while data arrives is reset, and the client drops the answer unread. So the rest of the body is read and dropped, up to
a bound, before the connection is closed.

ASGI's ``send`` is a coroutine: it needs a task, and waking one for each of two hundred streams costs a third of the
writes themselves. So each request's scope offers an ASGI extension: a plain function that writes a chunk now. Parsing,
keep-alive, slow and disconnected clients stay uvicorn's.

Java's client asks with each request for HTTP/2 ("Upgrade: h2c"), which a server may ignore: no other protocol is spoken
here. httptools ends a request at its head if it asks for another protocol: a POST would have no body. So its head is
parsed anew without that wish. A client of HTTP/1.0 knows no chunks: it gets the bytes of a stream as they are, to the
end of the connection.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from manylora.serving.http.access import Refusals
from manylora.serving.http.connections import ConnectionBounds, client_of
from manylora.serving.http.errors import HttpError, error_body

__all__ = ["ChunkWritingProtocol", "WriteChunk", "chunk_writer", "connection_breaker"]

EXTENSION = "manylora.write_chunk"
NO_EXTENSION: dict[str, Any] = {"write": lambda body: False, "break": lambda: None}

WriteChunk: TypeAlias = Callable[[bytes], bool]
"""Writes a chunk of a started response now, or returns False: then ``send`` must be awaited for it."""

FRAME_BYTES = 16
"""Bytes around a byte of a body that are no more than the sizes of chunks; a chunk of one byte has five."""

logger = logging.getLogger(__name__)


class ReadPhase(Enum):
    """The part of a request that a connection waits for."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


@dataclass(frozen=True, slots=True)
class _Answering:
    """A connection as a request's answer sees it: the protocol decides how it is closed."""

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    close: Callable[[], None]


class ChunkWritingProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the bounds and the extension."""

    def __init__(self, *args: Any, bounds: ConnectionBounds, refusals: Refusals | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ws_protocol_class = None  # a connection that changed its protocol would leave the bounds
        self._bounds = bounds
        self._refusals = refusals
        self.plain_head = b""  # of a request that asks for an upgrade, without that; until it is parsed anew
        self._refusal: bytes | None = None  # of the request that arrives, in place of the application's answer
        self._num_refusals = 0  # in the piece of data that is parsed
        self._running: RequestResponseCycle | None = None  # ``cycle`` is the last that was parsed
        self._address = ""
        self._unsent, self._unsent_at = 0, 0.0  # bytes that wait for a client that does not read, and since when
        self._is_refused = False
        self._phase = ReadPhase.IDLE
        self._num_beside = 0  # bytes since the last head or body that are part of none
        self._head_bytes = 0  # of the complete lines of a head, or of trailers
        self._num_dropped: int | None = None  # bytes of a request after its answer
        self._deadline: asyncio.TimerHandle | None = None

    # -- connections -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a connection; refuse one too many with 503, unless an idle one makes room."""
        super().connection_made(transport)
        bounds = self._bounds
        self._address = client_of(self.client[0]) if self.client else ""
        bounds.num_of[self._address] += 1
        bounds.watch_readers(self.connections, self.loop)  # type: ignore[arg-type]
        if bounds.num_of[self._address] > bounds.max_per_address or (
            len(self.connections) > bounds.max_connections and not bounds.make_room()
        ):
            self._refuse(503, "The server has as many connections as it takes; please try again.")
        else:
            self._await(bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection, and end the request that is being answered."""
        self._stop_waiting()
        self._bounds.idle.pop(self, None)
        if (running := self._running) is not None and running is not self.cycle:  # uvicorn tells the last one alone
            running.disconnected = True
            running.message_event.set()
        num_of = self._bounds.num_of
        num_of[self._address] -= 1
        if not num_of[self._address]:
            del num_of[self._address]
        super().connection_lost(exc)

    def close_idle(self) -> bool:
        """Close a connection between two requests; return whether it was open."""
        if self.transport.is_closing():
            return False
        self.transport.close()
        return True

    def check_reader(self, now: float) -> None:
        """Break a connection whose client has not taken a byte of the answer that waits for it.

        Bytes that wait are compared only while none are added: while writing is paused, or after the last.
        """
        if not (self.flow.write_paused or self.transport.is_closing()):
            self._unsent = 0
        elif (unsent := self.transport.get_write_buffer_size()) != self._unsent:
            self._unsent, self._unsent_at = unsent, now
        elif unsent and now - self._unsent_at >= self._bounds.write_timeout_s:
            logger.info("reader_stopped address=%s unsent_bytes=%d", self._address, unsent)
            self.transport.abort()

    # -- requests ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse data; refuse what is too large, and begin to wait for a request that is not complete."""
        if self._is_refused:
            if self._num_dropped is not None:
                self._drop(len(data))
            return
        self._num_refusals = 0
        self._num_beside += len(data)
        self._unset_keepalive_if_required()
        try:
            while data:
                data = _feed(self, data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._num_beside > self._bounds.max_header_bytes:
            self._refuse_headers()
        elif self._phase is ReadPhase.HEAD:
            if self._deadline is None:
                self._await(self._bounds.header_timeout_s)
        elif self._phase is ReadPhase.BODY:
            if self._deadline is None:
                self._await(self._bounds.body_timeout_s)
        elif (
            self._deadline is None
            and self.timeout_keep_alive_task is None
            and (self.cycle is None or self.cycle.response_complete)
        ):
            self._await(self._bounds.header_timeout_s)  # empty lines ended the wait of uvicorn's keep-alive

    def send_400_response(self, msg: str) -> None:
        """Answer data that is no HTTP, unless it was refused for another reason while it was parsed."""
        if not self._is_refused:
            self._is_refused = True
            self._stop_waiting()
            self._bounds.log.note("connection_refused status=400", self._address)
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._unset_keepalive_if_required()  # of a refusal in the same piece of data
        self._phase, self._head_bytes, self._num_dropped = ReadPhase.HEAD, 0, None

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer, which is dropped."""
        self._count(len(name) + len(value) + 4)
        if self._phase is ReadPhase.BODY:
            return
        if len(self.headers) >= self._bounds.max_headers:
            self._refuse_headers()
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Refuse a request without room; else add the extension to the scope, before the application's task runs."""
        if self.parser.should_upgrade() and (method := self.parser.get_method()) != b"CONNECT":
            self.plain_head = _plain_head(method, self.url, self.parser.get_http_version(), self.headers)
            return
        self._phase, self._num_beside = ReadPhase.BODY, 0
        self._stop_waiting()
        if self._refusals is not None and self._can_refuse():
            self._refusal = self._refusals.answer(self.url, self.headers)
            if self._refusal is not None:
                self._num_refusals += 1
                if self._num_refusals > self._bounds.max_pipelined:
                    self._hang_up()
                return
        if len(self.pipeline) >= self._bounds.max_pipelined:
            self._hang_up()
        super().on_headers_complete()
        self.cycle.transport = _Answering(  # type: ignore[assignment]
            self.transport.write, self.transport.is_closing, self._close
        )
        write = functools.partial(_write_chunk, self.cycle)
        self.scope["extensions"] = {EXTENSION: {"write": write, "break": self.transport.abort}}

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, unless the request is refused or has its answer."""
        self._num_beside = max(0, self._num_beside - FRAME_BYTES * len(body))
        if self._refusal is not None:
            return
        if self.cycle.response_complete:
            self._drop(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request: the next begins with its first byte."""
        if self.plain_head:
            return
        self._phase, self._num_beside = ReadPhase.IDLE, 0
        self._stop_waiting()
        if self._refusal is None:
            super().on_message_complete()
        else:
            self._send_refusal(self._refusal)
            self._refusal = None

    def on_response_complete(self) -> None:
        """Begin the next request; read no more of them before the last has its turn."""
        if self._is_refused:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        elif self.timeout_keep_alive_task is not None:
            self._bounds.idle[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _unset_keepalive_if_required(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self._bounds.idle.pop(self, None)
        super()._unset_keepalive_if_required()

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _can_refuse(self) -> bool:
        """Return whether a refusal would be the next answer on this connection, and would be read."""
        return (
            self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
        )

    def _send_refusal(self, rest: bytes) -> None:
        """Answer in place of the application, once the body has arrived."""
        headers = b"".join([b"%b: %b\r\n" % header for header in self.server_state.default_headers])
        keeps_alive = self.parser.should_keep_alive()
        if not keeps_alive:
            headers += b"connection: close\r\n"
        self.transport.write(STATUS_LINE[429] + headers + rest)
        if keeps_alive:
            self.on_response_complete()
        else:
            self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._bounds.max_header_bytes:
            self._refuse_headers()
            raise ValueError("the headers are too large")  # ends the parser, which calls ``send_400_response``

    def _refuse_headers(self) -> None:
        bounds = self._bounds
        self._refuse(
            431,
            f"Expected at most {bounds.max_headers} headers of {bounds.max_header_bytes} bytes in all, "
            "and at most as many bytes of trailers, chunk extensions and empty lines",
        )

    def _hang_up(self) -> None:
        """Close a connection that sends requests without waiting for answers, and end the parser."""
        self._bounds.log.note("connection_closed reason=pipelined", self._address)
        self._is_refused = True
        self._stop_waiting()
        self.transport.close()
        raise ValueError("too many requests wait")

    def _await(self, timeout_s: float) -> None:
        self._deadline = self.loop.call_later(timeout_s, self._time_out)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        self._refuse(408, "The request did not arrive in time")

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_waiting()
        self._bounds.log.note(f"connection_refused status={status}", self._address)
        if self._has_begun_to_answer():
            self.transport.close()
            return
        self.transport.write(_refusal(status, message))
        self.transport.close()

    def _has_begun_to_answer(self) -> bool:
        """Return whether the client would take an answer for that of another request, or for a part of one."""
        cycle = self.cycle
        if cycle is None:
            return False
        if self._phase is ReadPhase.BODY:
            return cycle.response_started and self._refusal is None
        return not cycle.response_complete

    # -- the end -----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Close after an answer: at once, or when the client has sent the rest of the body or has left."""
        if self._phase is not ReadPhase.BODY or not self.cycle.response_complete:
            self.transport.close()
            return
        self._is_refused = True  # nothing that arrives is parsed
        self._num_dropped = 0
        self._stop_waiting()
        self._deadline = self.loop.call_later(self._bounds.linger_s, self.transport.close)
        self._bounds.idle[self] = None  # it makes room for others
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, num_bytes: int) -> None:
        """Count bytes that come after the answer to their request."""
        self._num_dropped = (self._num_dropped or 0) + num_bytes
        if self._num_dropped > self._bounds.linger_bytes:
            self.transport.close()


def _feed(protocol: ChunkWritingProtocol, data: bytes) -> bytes:
    """Parse data; return the data to be parsed next, behind the head of a request that asked for an upgrade."""
    try:
        protocol.parser.feed_data(data)
    except httptools.HttpParserUpgrade as upgrade:
        head, protocol.plain_head = protocol.plain_head, b""
        if head:  # else it is a CONNECT, whose connection has no other request
            protocol.parser = httptools.HttpRequestParser(protocol)
            protocol.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            return head + data[upgrade.args[0] :]
    return b""


def _plain_head(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its wish for another protocol; names of headers are in lower case."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines))


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return an application for one request, whose answer goes out as it is where it has no length."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_bare = False

        async def send_bare(message: Message) -> None:
            nonlocal is_bare
            if message["type"] == "http.response.start":
                is_bare = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_bare else None
            elif is_bare:
                cycle.expected_content_length = len(message.get("body", b""))  # the length that uvicorn compares
            await send(message)

        await app(scope, receive, send_bare)

    return answer


def _refusal(status: int, message: str) -> bytes:
    """Return an answer behind which the connection is closed."""
    body = msgspec.json.encode(error_body(HttpError(status, message)))
    return (
        STATUS_LINE[status]
        + b"content-type: application/json\r\nconnection: close\r\n"
        + (b"retry-after: 1\r\n" if status == 503 else b"")
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


def chunk_writer(scope: Scope) -> WriteChunk:
    """Return the function that writes a request's chunks; under another server it always returns False."""
    write: WriteChunk = scope.get("extensions", {}).get(EXTENSION, NO_EXTENSION)["write"]
    return write


def connection_breaker(scope: Scope) -> Callable[[], None]:
    """Return the function that breaks a request's connection, so that the client sees that its answer is not whole.

    Under another server it does nothing.
    """
    breaker: Callable[[], None] = scope.get("extensions", {}).get(EXTENSION, NO_EXTENSION)["break"]
    return breaker


def _write_chunk(cycle: RequestResponseCycle, body: bytes) -> bool:
    # ``RequestResponseCycle.send`` for a chunk in the middle, unless it would wait or drop it.
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
