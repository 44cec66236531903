"""Accepts connections in turns of their clients, and counts them from then on.

The kernel has one queue of new connections for all, and a connection costs a tenth of a millisecond before its first
byte is read. A client that opens thousands in a second would fill the queue with its own, and the others would wait
behind them. So the kernel's queue is emptied at once, which is cheap, and each client's connections wait in a queue of
their own. A connection that its client has closed meanwhile is dropped.

::

    kernel's queue      queues          opened in one pass
    f f f f f o f f     flood  f f f f  f o f f f f f f
                        other  o

With TLS a connection is opened by its handshake. One that never ends it counts like any other, and is given as much
time as the headers of a request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from manylora.serving.http.connections import ConnectionBounds, client_of
from manylora.serving.http.turns import CallerQueues

__all__ = ["Acceptor"]

TAKEN_AT_ONCE = 64
"""Connections that are taken from the kernel's queue in a pass of the event loop, in half a millisecond."""

OPENED_AT_ONCE = 8  # connections that are opened in a pass, in a millisecond

TOLD_OF_CLIENT, TOLD_IN_ALL = 256, 16
"""Connections beyond the bounds that are opened, to be told so; more are closed without a word."""

ESTABLISHED = 1  # the state of a connection that neither end has closed, in the kernel's numbers
PAUSE_S = 0.5  # time without new connections after one could not be taken, for lack of open files or memory

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Acceptor:
    """Accepts the connections of one listening socket until closed. For the event loop's thread alone.

    ``bounds`` knows the connections that are open; the owner of the ``listening`` socket closes it.
    """

    listening: socket.socket
    make_protocol: Callable[[], asyncio.Protocol]
    _: KW_ONLY
    bounds: ConnectionBounds
    num_open: Callable[[], int]
    backlog: int
    tls: Callable[[], ssl.SSLContext] | None = None  # returns the settings of TLS for the next handshake
    _queues: CallerQueues[socket.socket] = field(default_factory=CallerQueues)  # by client
    _num_of: Counter[str] = field(default_factory=Counter)  # connections in the queues, or being opened
    _num: int = 0  # of them in all
    _opening: set[asyncio.Task[None]] = field(default_factory=set)
    _is_due: bool = False
    _pause: asyncio.TimerHandle | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        # Before a handshake nothing can be told.
        self._told_of_client, self._told_in_all = (TOLD_OF_CLIENT, TOLD_IN_ALL) if self.tls is None else (0, 0)
        self._loop = asyncio.get_running_loop()
        listening = self.listening
        listening.setblocking(False)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which the connections inherit
        listening.listen(self.backlog)
        self._loop.add_reader(listening.fileno(), self._take)

    def close(self) -> None:
        """Accept no more, and close the connections that are not open yet; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is None:
            self._loop.remove_reader(self.listening.fileno())
        else:
            self._pause.cancel()
        for one in self._queues:
            one.close()
        self._queues.clear()
        if self.tls is not None:  # a handshake may take long
            for task in self._opening:
                task.cancel()

    async def wait_closed(self) -> None:
        """Return once no connection is being opened."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _take(self) -> None:
        """Take connections from the kernel's queue into the clients' queues."""
        for _ in range(TAKEN_AT_ONCE):
            try:
                one, address = self.listening.accept()
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionAbortedError:
                continue
            except OSError as error:
                logger.warning("connections_not_accepted error=%r", error.strerror)
                self._loop.remove_reader(self.listening.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self._resume)
                break
            client = client_of(address[0])
            if self._has_room(client):
                one.setblocking(False)
                self._num_of[client] += 1
                self._num += 1
                self._queues.put(client, one)
            else:
                one.close()
        if self._queues and not self._is_due:
            self._open_next()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self.listening.fileno(), self._take)

    def _has_room(self, client: str) -> bool:
        """Return whether another connection may wait, to be opened or to be told that it is one too many."""
        bounds = self.bounds
        if bounds.num_of[client] + self._num_of[client] >= bounds.max_per_address + self._told_of_client:
            return False
        if self.num_open() + self._num < bounds.max_connections:
            return True
        return bounds.make_room() or self._num < self._told_in_all

    def _open_next(self) -> None:
        self._is_due = False
        num_opened = 0
        for _ in range(TAKEN_AT_ONCE):
            if not self._queues or num_opened == OPENED_AT_ONCE:
                break
            client, one = self._queues.take()
            if _has_left(one):
                self._forget(client)
                one.close()
                continue
            num_opened += 1
            task = self._loop.create_task(self._open(one))
            self._opening.add(task)
            task.add_done_callback(functools.partial(self._note, client, one))
        if self._queues:
            self._is_due = True
            self._loop.call_soon(self._open_next)

    async def _open(self, one: socket.socket) -> None:
        """Give a connection its protocol, after the handshake of TLS.

        Without TLS that takes a pass, and is not cancelled: uvloop would close a connection that its protocol knows
        already, and never tell it of the end.
        """
        tls, timeout_s = (None, None) if self.tls is None else (self.tls(), self.bounds.header_timeout_s)
        transport, _ = await self._loop.connect_accepted_socket(
            self.make_protocol, one, ssl=tls, ssl_handshake_timeout=timeout_s
        )
        if self._is_closed:
            transport.close()

    def _note(self, client: str, one: socket.socket, task: asyncio.Task[None]) -> None:
        """Note that a connection is open, or will not be."""
        self._opening.discard(task)
        self._forget(client)
        if task.cancelled():
            one.close()
        elif (error := task.exception()) is not None:
            one.close()
            if not isinstance(error, OSError):  # else the client left, or cannot speak TLS
                logger.error("connection_not_opened error=%r", error)

    def _forget(self, client: str) -> None:
        self._num -= 1
        self._num_of[client] -= 1
        if not self._num_of[client]:
            del self._num_of[client]


def _has_left(one: socket.socket) -> bool:
    """Return whether a client has closed its connection, where the system tells: it costs a look, and no set-up."""
    if sys.platform != "linux":
        return False
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED
