"""The client's side of a request: its body, the few fields of it that the router reads, and the client's end.

The body goes to the backend as it came. Values of other fields are skipped, not decoded.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive

from manylora.core.errors import RequestError
from manylora.route.relay.exchange import Exchange
from manylora.serving.http.errors import HttpError
from manylora.serving.http.room import ArrivingBody

__all__ = ["Client", "ClientClosed", "read_fields", "with_model"]

BYTES_PER_TOKEN = 4
_NONE = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: str | None = None
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE


_decoder = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_fields(body: bytes) -> tuple[str | None, int]:
    """Return the model that a body names, if it names one, and the length of its prompt in tokens.

    Token ids are counted; of text every four bytes count as one token.

    Raises:
        RequestError: The body is no JSON object, or its model no string.
    """
    try:
        read = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not a JSON object as expected: {error}") from None
    return read.model, _num_tokens(bytes(read.prompt or read.messages or read.input))


def with_model(body: bytes, model: str) -> bytes:
    """Return a body that names another model; all other fields stay as they are, byte by byte."""
    fields = _fields.decode(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _num_tokens(raw: bytes) -> int:
    inner = raw[1:32].lstrip()
    if raw[:1] == b"[" and (inner[:1].isdigit() or inner[:1] == b"["):
        return raw.count(b",") + 1
    return len(raw) // BYTES_PER_TOKEN


class ClientClosed(Exception):
    """The client has closed its connection; there is nothing to answer."""


class Client:
    """The client's side of one request; ``is_gone`` once it has closed its connection.

    Args:
        receive: Receives the messages of the ASGI server.
        arriving: Counts the body, until it is needed no more.
    """

    def __init__(self, receive: Receive, arriving: ArrivingBody) -> None:
        self._receive = receive
        self._arriving = arriving
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_gone = False

    async def body(self, max_bytes: int) -> bytes:
        """Return the body of the request, and watch for the end of the connection from then on.

        Raises:
            ClientClosed: The client went before the end of the body.
            HttpError: 413, it is too large; 429, other bodies leave no room.
        """
        pieces, num_bytes, is_more = [], 0, True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientClosed
            piece, is_more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise HttpError(413, f"The body is larger than {max_bytes} bytes.", headers={"Connection": "close"})
            self._arriving.grow(num_bytes)
            pieces.append(piece)
        self._task = asyncio.create_task(self._watch())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def waits_for(self, exchange: Exchange | None) -> None:
        """Cancel this exchange when the client goes.

        Raises:
            ClientClosed: The client has gone already.
        """
        self._exchange = exchange
        if self.is_gone:
            raise ClientClosed

    async def until_gone(self) -> None:
        """Wait for the end of the connection."""
        if self._task is not None:
            await self._task

    def forget_body(self) -> None:
        """Count the body no more: it will not be sent again."""
        self._arriving.close()

    def close(self) -> None:
        """Stop to watch."""
        self.forget_body()
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self._exchange is not None:
            self._exchange.cancel()
