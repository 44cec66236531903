"""The connections of one HTTP server: their bounds, and room for new ones.

A client that stops reading is found by looking at all connections now and then: a write costs nothing more for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from manylora.serving.http.repeated_lines import RepeatedLines

__all__ = ["Connection", "ConnectionBounds", "client_of", "max_open_files"]

LOOKS_PER_TIMEOUT = 4
"""Looks at all connections in the time that a client has to read."""


class Connection(Protocol):
    """A connection, as its server sees it."""

    def close_idle(self) -> bool:
        """Close it between two requests; return whether it was open."""
        ...

    def check_reader(self, now: float) -> None:
        """Break it if its client reads nothing of its answer."""
        ...


@dataclass(slots=True, kw_only=True)
class ConnectionBounds:
    """The bounds of a server's connections, and the connections by client.

    Args:
        max_connections: Connections in all. Beyond it, an idle one makes room.
        max_per_address: Connections of one client.
        header_timeout_s: Time from the connection, or from the first byte of a later request, to the end of its
            headers.
        body_timeout_s: Time from there to the end of its body.
        write_timeout_s: Time in which a client takes at least a byte of an answer that waits for it.
        max_header_bytes: Bytes of a request's line and headers.
        max_headers: Headers of a request.
        max_pipelined: Requests of a connection that wait for the answer to the one before.
        linger_bytes: Bytes of a body that are read and dropped after the answer, so that the client reads it.
        linger_s: Time for them, if the connection is to be closed.
        log: Writes the lines about connections that are refused.
    """

    max_connections: int
    max_per_address: int
    header_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float = 300.0
    max_header_bytes: int = 64 * 1024
    max_headers: int = 128
    max_pipelined: int = 8
    linger_bytes: int = 64 << 20
    linger_s: float = 10.0
    log: RepeatedLines = field(default_factory=RepeatedLines)
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


def max_open_files() -> int | None:
    """Raise the number of files that this process may open as far as it may; return it, ``None`` for any number."""
    num_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files != most:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse their own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            num_files = most
    return None if num_files == resource.RLIM_INFINITY else num_files


def client_of(address: str) -> str:
    """Return the part of an address that counts as one client: of IPv6 the network (/64), which one machine may own."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
