"""uvicorn's HTTP/1.1 protocol, with a function that writes a chunk of a body without a task.

ASGI's ``send`` is a coroutine: it needs a task, and waking one for each of two hundred streams costs a third of the
writes themselves. So each request's scope offers an ASGI extension: a plain function that writes a chunk now. Parsing,
headers, keep-alive, slow and disconnected clients stay uvicorn's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["ChunkWritingProtocol", "WriteChunk", "chunk_writer", "connection_breaker"]

EXTENSION = "manylora.write_chunk"

WriteChunk: TypeAlias = Callable[[bytes], bool]
"""Writes a chunk of a started response now, or returns False: then ``send`` must be awaited for it."""


class ChunkWritingProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the extension."""

    def on_headers_complete(self) -> None:
        """Add the extension to the scope; the application's task was just created and has not run."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # false after a protocol upgrade
            write = functools.partial(_write_chunk, self.cycle)
            self.scope["extensions"] = {EXTENSION: {"write": write, "break": self.transport.abort}}


def chunk_writer(scope: Scope) -> WriteChunk:
    """Return the function that writes a request's chunks; under another server it always returns False."""
    write: WriteChunk = scope.get("extensions", {}).get(EXTENSION, {}).get("write", _never)
    return write


def connection_breaker(scope: Scope) -> Callable[[], None]:
    """Return the function that breaks a request's connection, so that the client sees that its answer is not whole."""
    breaker: Callable[[], None] = scope["extensions"][EXTENSION]["break"]
    return breaker


def _never(body: bytes) -> bool:
    return False


def _write_chunk(cycle: RequestResponseCycle, body: bytes) -> bool:
    # ``RequestResponseCycle.send`` for a chunk in the middle, unless it would wait or drop it.
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
