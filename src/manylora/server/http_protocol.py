"""uvicorn's HTTP/1.1 protocol, with a way to write a piece of a body without a task.

ASGI's ``send`` is a coroutine: bytes for a client need a task to call it, and waking one for each of two hundred
streams costs a third of the price of the writes. So each request's scope offers an extension, as the
ASGI specification provides for: a plain function that writes a chunk now. Everything else (parsing, headers, keeping
alive, slow clients, leaving ones) stays uvicorn's, and an application that does not know the extension misses nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["ChunkWritingProtocol", "WriteChunk", "chunk_writer"]

EXTENSION = "manylora.write_chunk"

WriteChunk: TypeAlias = Callable[[bytes], bool]
"""Writes a piece of a begun response's body now. False where ``send`` has to be awaited for it instead."""


class ChunkWritingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose answers can be written chunk by chunk without a task."""

    def on_headers_complete(self) -> None:
        """Offer the extension to the application, whose task was just made and has not run."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # not so where the protocol is changed
            self.scope["extensions"] = {EXTENSION: {"write": functools.partial(_write_chunk, self.cycle)}}


def chunk_writer(scope: Scope) -> WriteChunk:
    """Return what writes the answer to a request; behind another server, a function that always says no."""
    write: WriteChunk = scope.get("extensions", {}).get(EXTENSION, {}).get("write", _never)
    return write


def _never(body: bytes) -> bool:
    return False


def _write_chunk(cycle: RequestResponseCycle, body: bytes) -> bool:
    # ``RequestResponseCycle.send`` for a chunk in the middle, where it would neither wait nor drop it.
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
