"""The connections of one HTTP server: their bounds, and room for new ones.

A client that stops reading is found by looking at all connections now and then: a write costs nothing more for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["REPEATED_EVERY_S", "Connection", "ConnectionBounds", "RepeatedLines", "client_of", "within_open_files"]

LOOKS_PER_TIMEOUT = 4  # looks at all connections in the time that a client has to read
REPEATED_EVERY_S = 1.0  # time between two lines of the log with one text

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """A connection, as its server sees it."""

    def close_idle(self) -> bool:
        """Close the connection between two requests; return whether it was open."""

    def check_reader(self, now: float) -> None:
        """Break the connection if the client has taken no byte of an answer within the time limit."""


class RepeatedLines:
    """Lines of the log that clients cause: the first is written at once, the same ones after it once a second.

    A line for each bad request would fill a disk faster than a client fills its connection. For one event loop's thread
    alone.
    """

    def __init__(self) -> None:
        self._num_of: dict[str, int] = {}  # since the last line; texts are few, so it is bounded
        self._last_address: dict[str, str] = {}

    def note(self, text: str, address: str) -> None:
        """Write a line now, or count it for the next.

        ``text`` is one of a few, with nothing of the client in it; of several addresses the line has the last.
        """
        if text in self._num_of:
            self._num_of[text] += 1
            self._last_address[text] = address
        else:
            self._write(text, address, 1)

    def _write(self, text: str, address: str, num: int) -> None:
        logger.info("%s num=%d address=%s", text, num, address)
        self._num_of[text] = 0
        asyncio.get_running_loop().call_later(REPEATED_EVERY_S, self._end_interval, text)

    def _end_interval(self, text: str) -> None:
        if num := self._num_of.pop(text):
            self._write(text, self._last_address[text], num)


@dataclass(slots=True, kw_only=True)
class ConnectionBounds:
    """The bounds of a server's connections, and the connections by client."""

    max_connections: int  # connections in all. Beyond it, an idle one makes room
    max_per_address: int  # connections of one client
    # Time from the connection, or from the first byte of a later request, to the end of its headers.
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0  # time from there to the end of its body
    write_timeout_s: float = 300.0  # time in which a client takes at least a byte of an answer that waits for it
    keep_alive_s: float = 5.0  # time from an answer to the first byte of the next request
    backlog: int = 2048  # connections that wait in the kernel to be accepted
    max_header_bytes: int = 64 * 1024  # bytes of a request's line and headers
    max_headers: int = 128  # headers of a request
    max_pipelined: int = 8  # requests of a connection that wait for the answer to the one before
    # Bytes of a body that are read and dropped after the answer, so that the client reads it.
    linger_bytes: int = 64 << 20
    linger_s: float = 10.0  # time for them, if the connection is to be closed
    log: RepeatedLines = field(default_factory=RepeatedLines)  # writes the lines about connections that are refused
    num_of: Counter[str] = field(default_factory=Counter)
    idle: dict[Connection, None] = field(default_factory=dict)  # between two requests, the longest first
    _next_look: asyncio.TimerHandle | None = None

    def make_room(self) -> bool:
        """Close the connection that has been idle for longest; return whether there was one."""
        while self.idle:
            one = next(iter(self.idle))
            del self.idle[one]
            if one.close_idle():
                return True
        return False

    def watch_readers(self, connections: Iterable[Connection], loop: asyncio.AbstractEventLoop) -> None:
        """Look at ``connections`` now and then, as long as there are any."""
        if self._next_look is None:
            self._next_look = loop.call_later(self.write_timeout_s / LOOKS_PER_TIMEOUT, self._look, connections, loop)

    def _look(self, connections: Iterable[Connection], loop: asyncio.AbstractEventLoop) -> None:
        self._next_look = None
        found = list(connections)
        for one in found:
            one.check_reader(loop.time())
        if found:
            self.watch_readers(connections, loop)


def within_open_files(num_connections: int, *, files_beside: int, files_each: int = 1) -> int:
    """Return how many of some connections this process may open, after raising its limit as far as it may.

    It opens ``files_beside`` other files, and ``files_each`` for each connection.
    """
    num_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files != most:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse their own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            num_files = most
    if num_files == resource.RLIM_INFINITY:
        return num_connections
    return max(1, min(num_connections, (num_files - files_beside) // files_each))


def client_of(address: str) -> str:
    """Return the part of an address that counts as one client: of IPv6 the network (/64), which one machine may own."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
