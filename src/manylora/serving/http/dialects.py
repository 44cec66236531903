"""Clients that speak more than HTTP/1.1, or less.

Java's client asks with each request for HTTP/2 ("Upgrade: h2c"), which a server may ignore: no other protocol is spoken
here. A client of HTTP/1.0 knows no chunks: it gets the bytes of a stream as they are, to the end of the connection.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["plain_head", "without_chunks"]


def plain_head(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its wish for another protocol; names of headers are in lower case."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines))


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return an application for one request, whose answer goes out as it is where it has no length."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_bare = False

        async def send_bare(message: Message) -> None:
            nonlocal is_bare
            if message["type"] == "http.response.start":
                is_bare = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_bare else None
            elif is_bare:
                cycle.expected_content_length = len(message.get("body", b""))  # the length that uvicorn compares
            await send(message)

        await app(scope, receive, send_bare)

    return answer
