"""The API process's end of an engine's TCP sockets, and the notice of a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from manylora.serving.hosting.links.inbox import Inbox
from manylora.serving.hosting.protocol import Command, Message, encode
from manylora.serving.hosting.ray.actor import Door
from manylora.serving.hosting.sockets import MAX_FRAME_BYTES, endpoint

__all__ = ["CurveKeys", "EngineConnection"]

LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

KEEP_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 10_000,
}
"""A node without power is noticed after ten seconds. Kernels answer, so that a stopped process on either side is not
taken for a lost node: the watchdog sees to engines that hang."""


class CurveKeys(NamedTuple):
    """A pair of keys, as Z85."""

    public: bytes
    secret: bytes


class EngineConnection:
    """Two connections to one engine. They are never made again: after a loss, messages may be missing.

    For the event loop's thread alone.

    Args:
        door: The engine's address and public key; no other process can take its place.
        keys: The keys of this process.
        deliver: Called with the engine's messages.
    """

    def __init__(self, door: Door, keys: CurveKeys, deliver: Callable[[Sequence[Message]], None]) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done once the network or the engine has closed a connection: the event, in words."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._monitors: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}  # by the socket that each reports about
        messages = self._connect(zmq.PULL, door, door.messages_port, keys)
        self._commands = self._connect(zmq.PUSH, door, door.commands_port, keys)
        self._inbox = Inbox(messages, deliver)

    @property
    def broken(self) -> asyncio.Future[str]:
        """Done once a message could not be decoded, with the reason, or when closed."""
        return self._inbox.broken

    def send(self, command: Command) -> None:
        """Send a command; one to an engine that is lost is dropped."""
        if not self._commands.closed:
            with contextlib.suppress(zmq.Again):
                self._commands.send(encode(command), zmq.NOBLOCK)

    def close(self) -> None:
        """Close both connections; may be called again."""
        if self._commands.closed:  # two threads that end one context are undefined in ZeroMQ
            return
        loop = asyncio.get_running_loop()
        for socket, monitor in self._monitors.items():
            loop.remove_reader(monitor.fileno())
            # While the socket is open: an event without a reader would hold up ZeroMQ's thread for ever.
            socket.disable_monitor()
            monitor.close(linger=0)
        self._monitors.clear()
        self._inbox.close()
        self._commands.close(linger=0)
        # After a refused handshake ZeroMQ sometimes never ends its context, and nothing here waits for that.
        threading.Thread(target=self._context.term, name="connection-end", daemon=True).start()

    def _connect(self, kind: int, door: Door, port: int, keys: CurveKeys) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.curve_serverkey = door.public_key
        socket.setsockopt(zmq.IPV6, int(":" in door.host))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # the port listens before the engine process answers
        for option, value in KEEP_ALIVE.items():
            socket.setsockopt(option, value)
        monitor = socket.get_monitor_socket(LOST_EVENTS)
        self._monitors[socket] = monitor
        asyncio.get_running_loop().add_reader(monitor.fileno(), self._note_loss, monitor)
        self._note_loss(monitor)  # ZeroMQ signals only the change from empty
        socket.connect(endpoint(door.host, port))
        return socket

    def _note_loss(self, monitor: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = zmq.Event(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
                if not self.lost.done():
                    self.lost.set_result(str(event.name).lower())
