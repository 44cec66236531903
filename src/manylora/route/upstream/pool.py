"""The connections to one address: idle ones are used again, the last one first."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable

from manylora.route.upstream.address import Address
from manylora.route.upstream.connection import UpstreamConnection

__all__ = ["CannotConnect", "Pool"]

IDLE_S = 4.0
"""Longest use of an idle connection again, in seconds: uvicorn, and so vLLM, closes them after five."""
MAX_IDLE = 1024

logger = logging.getLogger(__name__)


class CannotConnect(Exception):
    """No connection could be made; the text is the reason."""


class Pool:
    """The connections to one address; ``num_surplus`` counts those closed for bytes behind an answer.

    Args:
        address: Of the backend.
        connect_timeout_s: Time that a connection may take, in seconds.
        now: Returns the time in seconds.
    """

    def __init__(self, address: Address, *, connect_timeout_s: float, now: Callable[[], float]) -> None:
        self.num_surplus = 0
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._now = now
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._is_closed = False

    def idle(self) -> UpstreamConnection | None:
        """Take an idle connection; ``None`` if there is none."""
        oldest = self._now() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and connection.is_quiet():
                return connection
            connection.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """Make a connection.

        Raises:
            CannotConnect: It was refused, or took too long.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self._on_idle, self._on_closed, self._on_surplus),
                    self._address.host,
                    self._address.port,
                    ssl=self._tls,
                    server_hostname=self._address.name if self._tls is not None else None,
                )
        except TimeoutError:
            raise CannotConnect("the connection took too long") from None
        except (OSError, ssl.SSLError) as error:
            raise CannotConnect(error.strerror or str(error)) from None
        self._open.add(connection)
        return connection

    def sweep(self) -> None:
        """Close the connections that have been idle for too long."""
        oldest = self._now() - IDLE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().close()

    def close(self) -> None:
        """Close the idle connections now, and the others when their exchange has ended."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def abort(self) -> None:
        """Close all connections; exchanges under way fail."""
        self.close()
        for connection in list(self._open):
            connection.cancel()

    def _on_idle(self, connection: UpstreamConnection) -> None:
        if self._is_closed or len(self._idle) >= MAX_IDLE:
            connection.close()
            return
        connection.idle_since = self._now()
        self._idle.append(connection)

    def _on_surplus(self) -> None:
        self.num_surplus += 1
        logger.warning("surplus_answer url=%s", self._address.url)

    def _on_closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
