"""A whole answer to a request of the router's own: a poll, a load of an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from manylora.route.upstream.connection import Failure, Headers, UpstreamConnection
from manylora.route.upstream.pool import CannotConnect, Pool

__all__ = ["FetchFailed", "fetch"]


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
        elif self._on_piece is not None:
            self._on_piece(piece)
        else:
            self._pieces.append(piece)

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
    """Send a request; return the status and the body of its answer.

    Args:
        pool: Of the backend.
        head: See ``request_head``.
        body: Its body.
        timeout_s: Time for all of it, in seconds.
        max_bytes: Most bytes of the answer's body.
        on_piece: Takes the body in pieces; the returned body is then empty.

    Raises:
        FetchFailed: No connection, no whole answer in time, or one that is too large.
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
