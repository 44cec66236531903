"""The end of a socket on which an engine's messages arrive, read by the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import zmq

from manylora.serving.hosting.protocol import Message, decode_message

__all__ = ["Inbox"]

AT_ONCE_BYTES = 1024 * 1024
"""Bytes of messages that are delivered at once, in some five milliseconds: sixty steps of two hundred streams.

Tokens of a stream that are delivered together share a write, so a busy server lives on large pieces.
"""


class Inbox:
    """Delivers the messages of one socket, until closed. For the event loop's thread alone.

    Args:
        socket: The socket, which is closed with the inbox.
        deliver: Called with all messages that have arrived together, so that several tokens share one write.
    """

    def __init__(self, socket: zmq.Socket[bytes], deliver: Callable[[Sequence[Message]], None]) -> None:
        loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[str] = loop.create_future()
        """Done once no more messages are read: the reason, in words."""
        self._socket = socket
        self._deliver = deliver
        loop.add_reader(socket.fileno(), self._receive)
        self._receive()

    def close(self, reason: str = "it was stopped") -> None:
        """Close the socket; may be called again."""
        if not self._socket.closed:
            self._stop(reason)
            self._socket.close(linger=0)

    def _stop(self, reason: str) -> None:
        """Read no more. The owner closes the socket, after it has let go of all that watches it."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if not self.broken.done():
            self.broken.set_result(reason)

    def _receive(self) -> None:
        """Deliver messages that have arrived; the event loop calls this when the socket becomes readable.

        The socket must be read until it is empty, because ZeroMQ signals only the change from empty. After some
        messages others have their turn, so that a loop that lags still answers.
        """
        if self._socket.closed:
            return
        messages: list[Message] = []
        room = AT_ONCE_BYTES
        try:
            with contextlib.suppress(zmq.Again):
                while room > 0:
                    message = self._socket.recv(zmq.NOBLOCK)
                    room -= len(message)
                    messages.append(decode_message(message))
            if room <= 0:
                asyncio.get_running_loop().call_soon(self._receive)
            if messages:
                self._deliver(messages)
        except Exception as error:
            self._stop(repr(error))
