"""The connections to one address, and whole answers over them for requests of the router's own.

Idle connections are used again, the last one first.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from time import monotonic

from manylora.core.errors import ConfigError
from manylora.route.upstream.address import Address
from manylora.route.upstream.connection import Failure, Headers, UpstreamConnection
from manylora.serving.http.rereading import stamp_of

__all__ = ["CannotConnect", "FetchFailed", "Pool", "backend_tls", "fetch"]

IDLE_S = 4.0  # longest use of an idle connection again, in seconds: uvicorn, and so vLLM, closes them after five
MAX_IDLE = 1024

logger = logging.getLogger(__name__)


class CannotConnect(Exception):
    """No connection could be made; the text is the reason."""


_tls_of: dict[str | None, tuple[object, ssl.SSLContext]] = {}


def backend_tls(ca_certs: str | None) -> ssl.SSLContext:
    """Return the settings of TLS towards backends, whose certificates lead to these, or to those of the system.

    One for all: reading the system's takes tens of milliseconds. A file that has changed is read again; one that cannot
    be used then changes nothing. ``ConfigError`` if it could never be used.
    """
    stamp = None if ca_certs is None else stamp_of(ca_certs)
    before = _tls_of.get(ca_certs)
    if before is not None and before[0] == stamp:
        return before[1]
    try:
        context = ssl.create_default_context(cafile=ca_certs)
    except (ssl.SSLError, OSError) as error:
        if before is None:
            raise ConfigError(f"Got backend_ca_certs = {ca_certs!r}, which cannot be used: {error}") from error
        logger.error("backend_ca_certs_kept file=%s error=%r", ca_certs, str(error))
        context = before[1]
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _tls_of[ca_certs] = stamp, context
    return context


class Pool:
    """The connections to one address; ``num_surplus`` counts connections closed for bytes behind an answer.

    ``ca_certs`` are those that the certificate of TLS must lead to; ``None`` for those of the system.
    """

    def __init__(self, address: Address, *, connect_timeout_s: float, ca_certs: str | None = None) -> None:
        self.num_surplus = 0
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._ca_certs = ca_certs
        if address.is_tls:
            backend_tls(ca_certs)  # a mistake is told here
        self._is_closed = False

    def idle(self) -> UpstreamConnection | None:
        """Take an idle connection; ``None`` if there is none."""
        oldest = monotonic() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and connection.is_quiet():
                return connection
            connection.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """Make a connection; ``CannotConnect`` if the connection was refused, or took too long."""
        loop = asyncio.get_running_loop()
        tls = backend_tls(self._ca_certs) if self._address.is_tls else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self._on_idle, self._on_closed, self._on_surplus),
                    self._address.host,
                    self._address.port,
                    ssl=tls,
                    server_hostname=self._address.name if tls is not None else None,
                )
        except TimeoutError:
            raise CannotConnect("the connection took too long") from None
        except (OSError, ssl.SSLError) as error:
            raise CannotConnect(error.strerror or str(error)) from None
        self._open.add(connection)
        return connection

    def sweep(self) -> None:
        """Close the connections that have been idle for too long."""
        oldest = monotonic() - IDLE_S
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
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def _on_surplus(self) -> None:
        self.num_surplus += 1
        logger.warning("surplus_answer url=%s", self._address.url)

    def _on_closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class FetchFailed(Exception):
    """There is no whole answer; the text is the reason."""


class _FetchedBody:
    """Collects an answer up to a size, or hands its body on in pieces."""

    def __init__(self, max_bytes: int, on_piece: Callable[[bytes], None] | None) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.is_whole = False
        self._left = max_bytes
        self._status = 0
        self._on_piece = on_piece
        self._pieces: list[bytes] = []

    def head(self, status: int, headers: Headers) -> None:
        """Keep the status."""
        self._status = status

    def body(self, piece: bytes) -> None:
        """Keep a piece or hand it on."""
        self._left -= len(piece)
        if self._left < 0:
            self._fail("the answer is too large")
        elif self._on_piece is None:
            self._pieces.append(piece)
        elif self._status == 200 and not self.done.done():
            try:
                self._on_piece(piece)
            except FetchFailed as error:
                self.done.set_exception(error)

    def ended(self) -> None:
        """Deliver the answer."""
        if not self.done.done():
            self.is_whole = True
            self.done.set_result((self._status, b"".join(self._pieces)))

    def failed(self, failure: Failure) -> None:
        """Report the failure."""
        self._fail(failure.value)

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(FetchFailed(reason))


async def fetch(
    pool: Pool,
    head: bytes,
    body: bytes = b"",
    *,
    timeout_s: float,
    max_bytes: int,
    on_piece: Callable[[bytes], None] | None = None,
) -> tuple[int, bytes]:
    """Send a request, whose ``head`` is of ``request_head``; return the status and the body of its answer.

    With ``on_piece``, which takes the body of a good answer (200) in pieces, the returned one is empty. ``FetchFailed``
    without a connection, a whole answer within ``timeout_s`` seconds, for one of more than ``max_bytes``, and from
    ``on_piece``, which ends the answer by it.
    """
    connection: UpstreamConnection | None = None
    receiver = _FetchedBody(max_bytes, on_piece)
    try:
        async with asyncio.timeout(timeout_s):
            connection = await pool.connect()  # never one that the backend is about to close
            connection.begin(receiver, head, body)
            return await receiver.done
    except TimeoutError:
        raise FetchFailed(f"no answer in {timeout_s:g} s") from None
    except CannotConnect as error:
        raise FetchFailed(str(error)) from None
    finally:
        if connection is not None and (
            not receiver.done.done() or receiver.done.cancelled() or receiver.done.exception()
        ):
            connection.cancel()
