"""The client's side of a request: its body, and whether it is still there."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from manylora.route.relay.exchange import Exchange
from manylora.serving.http.errors import HttpError
from manylora.serving.http.room import ArrivingBody

__all__ = ["Client", "ClientClosed"]


class ClientClosed(Exception):
    """The client has closed its connection; there is nothing to answer."""


class Client:
    """The client's side of one request: whether it is still there.

    Args:
        receive: Of the ASGI application.
        arriving: Counts the body, until it is needed no more.
    """

    def __init__(self, receive: Receive, arriving: ArrivingBody) -> None:
        self._receive = receive
        self._arriving = arriving
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_gone = False

    async def body(self, max_bytes: int) -> bytes:
        """Return the body of the request, then begin to watch for the client's end.

        Raises:
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
            ClientGone: It went before.
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
