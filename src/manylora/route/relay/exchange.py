"""The two sides of a request: its client, and one attempt at one backend, whose answer goes to the client.

The body goes to the backend as it came. Of its fields the router reads a few; the others are skipped, not decoded.

Bytes of an answer are held until the first of the body are there: up to then the request can go to another backend.
From then on each read is written to the client from the callback that read it. When the client does not keep up, the
rest is held and the backend's connection is not read, until the client has taken it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import msgspec
from starlette.types import Receive

from manylora.core.errors import RequestError
from manylora.core.routing.prefixes import BYTES_PER_TOKEN, MOST_BYTES
from manylora.route.backend import Backend
from manylora.route.choice import PromptText
from manylora.route.upstream.connection import Failure, Headers, UpstreamConnection
from manylora.serving.http.errors import HttpError
from manylora.serving.http.http_protocol import WriteChunk
from manylora.serving.http.room import ArrivingBody

__all__ = ["Client", "ClientClosed", "Exchange", "is_event_stream", "read_fields", "with_fields"]

MAX_HELD_BYTES = 256 * 1024  # bytes of a body that are held before the backend's connection is no longer read

MAX_END_BYTES = 4  # of a line that ends, and an empty one

MAX_SALT_BYTES = 1024
_NONE = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: str | None = None
    cache_salt: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE


_decoder = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_fields(body: bytes) -> tuple[str | None, PromptText]:
    """Return the model that a body names, if it names one, and its prompt, in the order in which templates have it.

    Token ids are counted; of text every four bytes count as one token.
    ``RequestError`` if the body is no JSON object, or its model no string.
    """
    try:
        read = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not a JSON object as expected: {error}") from None
    asked = bytes(read.prompt or read.messages or read.input)
    before = bytes(read.tools) + bytes(read.system) + bytes(read.instructions)
    beginning = before[:MOST_BYTES] + asked[: max(0, MOST_BYTES - len(before))]
    num_tokens = _num_tokens(asked) + len(before) // BYTES_PER_TOKEN
    salt = bytes(read.cache_salt)[:MAX_SALT_BYTES]
    return read.model, PromptText(beginning, len(before) + len(asked), num_tokens, salt)


def with_fields(body: bytes, model: str, tenant: str | None = None) -> bytes:
    """Return a body with another model, and a salt of its prefixes for a tenant alone if there is one.

    Each of the two comes once; all other fields stay as they are, byte by byte.
    ``RequestError`` if a field's name, or the salt that the body has, is no text.
    """
    given = {"model": model}
    try:
        fields = _fields.decode(body)
        if tenant is not None:
            salt = msgspec.json.decode(fields.get("cache_salt", b"null"))
            given["cache_salt"] = f"{tenant} {salt if isinstance(salt, str) else ''}"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body cannot be passed on: {error}") from None
    return msgspec.json.encode(fields | {name: msgspec.Raw(msgspec.json.encode(text)) for name, text in given.items()})


def is_event_stream(headers: Headers) -> bool:
    """Return whether an answer comes as server-sent events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _num_tokens(raw: bytes) -> int:
    inner = raw[1:32].lstrip()
    if raw[:1] == b"[" and (inner[:1].isdigit() or inner[:1] == b"["):
        return raw.count(b",") + 1
    return len(raw) // BYTES_PER_TOKEN


@dataclass(eq=False)
class Exchange:
    """One attempt of a request at a backend: receives the answer and passes it on."""

    backend: Backend  # where the request was sent
    _: KW_ONLY
    first_byte_s: float  # time to the first byte of the body, in seconds
    idle_s: float  # time between two pieces of the body, in seconds
    # Called with every piece of an answer that is no error; ``None`` if its contents do not count.
    read: Callable[[bytes], None] | None = None
    status: int = 0
    headers: Headers = field(default_factory=list)
    failure: Failure | None = None
    is_whole: bool = False
    last: bytes = b""  # the last piece, with those before a short one; empty before the first
    # Whether the backend sent nothing to any other request either, within the time limit that this attempt met.
    is_backend_silent: bool = False
    drops: bool = False  # the client has left, and the rest of the answer is read for its count of tokens
    _is_paused: bool = False
    _timer: asyncio.TimerHandle | None = None
    _connection: UpstreamConnection | None = None
    _pieces: list[bytes] = field(default_factory=list)
    _num_held: int = 0
    _write: WriteChunk | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()

    @property
    def ends_an_event(self) -> bool:
        """Whether the last event of a stream of server-sent events is whole: another may follow."""
        return self.last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.is_whole or self.failure is not None

    @property
    def has_begun(self) -> bool:
        """Whether bytes of the body came."""
        return bool(self.last)

    def begin(self, connection: UpstreamConnection, head: bytes, body: bytes) -> None:
        """Send the request."""
        self._connection = connection
        self.backend.at_work.add(self)
        self._progress()
        self._timer = self._loop.call_later(self.first_byte_s, self._look)
        connection.begin(self, head, body)

    def cancel(self, failure: Failure = Failure.CANCELLED) -> None:
        """End the attempt; the backend is told by the end of the connection."""
        if self.is_over:
            return
        if self._connection is None:
            self.failed(failure)
        else:
            self._connection.cancel(failure)

    def client_left(self) -> None:
        """End the attempt, unless its answer is whole and its tokens are counted: they stand at its end.

        Such an answer is made already, and the rest of it is read and dropped.
        """
        is_whole = self.has_begun and self.status < 400 and not is_event_stream(self.headers)
        if self.read is None or self.is_over or not is_whole or self._connection is None:
            self.cancel()
            return
        self.drops, self._write = True, None
        self._pieces.clear()
        self._is_paused = False
        self._progress()
        self._connection.resume()

    async def started(self) -> None:
        """Wait for the first bytes of the body, of an error for all that are held, or the end."""
        while not (self.is_over or (self.last and (self.status < 400 or self._is_paused))):
            await self._change()

    def write_to(self, write: WriteChunk) -> None:
        """Write every piece as it comes, unless others are held, until these are taken."""
        self._write = write

    def held(self) -> list[bytes]:
        """Take the pieces that are held, to be sent by a call that waits for the client; later ones are held again."""
        pieces, self._pieces = self._pieces, []
        self._num_held, self._write = 0, None
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
        self.backend.num_reads += 1
        self.status, self.headers = status, headers

    def body(self, piece: bytes) -> None:
        """Write a piece, or hold it."""
        self.backend.num_reads += 1
        if self.status < 400:
            self.backend.num_pieces += 1
            if self.read is not None:
                self.read(piece)
        self._progress()
        if self._timer is not None and not self.last:
            self._timer.cancel()
            self._timer = self._loop.call_later(self.idle_s, self._look)
        self.last = piece if len(piece) > MAX_END_BYTES else self.last[-MAX_END_BYTES:] + piece
        if self.drops:
            return
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
            self.backend.at_work.discard(self)
            self._connection = None
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _progress(self) -> None:
        self._progress_at = self._loop.time()
        self._num_pieces_seen = self.backend.num_pieces

    def _look(self) -> None:
        """End the attempt if it has met its time limit; the client's time is not counted."""
        limit_s = self.idle_s if self.last else self.first_byte_s
        left_s = limit_s if self._is_paused else self._progress_at + limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self.is_backend_silent = self.backend.num_pieces == self._num_pieces_seen
        self.cancel(Failure.STALLED)

    def _wake(self) -> None:
        if not self._changed.done():
            self._changed.set_result(None)

    async def _change(self) -> None:
        await self._changed
        self._changed = self._loop.create_future()


class ClientClosed(Exception):
    """The client has closed its connection; there is nothing to answer."""


@dataclass(eq=False)
class Client:
    """The client's side of one request; ``is_gone`` once it has closed its connection."""

    receive: Receive  # receives the messages of the ASGI server
    arriving: ArrivingBody  # counts the body, until it is needed no more
    _exchange: Exchange | None = None
    _task: asyncio.Task[None] | None = None
    is_gone: bool = False

    async def body(self, max_bytes: int) -> bytes:
        """Return the body of the request, and watch for the end of the connection from then on.

        ``ClientClosed`` if the client went before its end; ``HttpError`` if it is too large (413), or other bodies
        leave no room (429).
        """
        pieces, num_bytes, is_more = [], 0, True
        while is_more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientClosed
            piece, is_more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise HttpError(413, f"The body is larger than {max_bytes} bytes.", headers={"Connection": "close"})
            self.arriving.grow(num_bytes)
            pieces.append(piece)
        self._task = asyncio.create_task(self._watch())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def waits_for(self, exchange: Exchange | None) -> None:
        """Cancel this exchange when the client goes; ``ClientClosed`` if the client has gone already."""
        self._exchange = exchange
        if self.is_gone:
            raise ClientClosed

    async def until_gone(self) -> None:
        """Wait for the end of the connection."""
        if self._task is not None:
            await self._task

    def forget_body(self) -> None:
        """Count the body no more: it will not be sent again."""
        self.arriving.close()

    def close(self) -> None:
        """Stop to watch."""
        self.forget_body()
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self._exchange is not None:
            self._exchange.client_left()
