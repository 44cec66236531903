"""Reading request bodies: the right media type, no more bytes than allowed.

Only ``application/json`` is taken: it is what clients send, and it is what a web page of another site cannot send
without asking first.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from manylora.server.errors import HttpError

__all__ = ["read_body"]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a JSON request.

    Raises:
        HttpError: 415, another media type; 413, too large; 400, the client left in the middle.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, f"Got the media type {media_type[:100]!r}, expected application/json")
    too_large = HttpError(413, f"The body is larger than {max_bytes} bytes", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise HttpError(400, "The body ended early") from None
    return b"".join(parts)
