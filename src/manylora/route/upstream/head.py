"""The heads of requests to backends and of answers to clients: which headers are passed on, and which are not."""

from __future__ import annotations

from collections.abc import Iterable

from manylora.route.upstream.address import Address
from manylora.route.upstream.connection import Headers

__all__ = ["answer_headers", "request_head"]

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-forwarded-for"}
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server"}


def request_head(
    address: Address,
    method: bytes,
    path: bytes,
    *,
    num_body_bytes: int,
    headers: Iterable[tuple[bytes, bytes]] = (),
    authorization: bytes | None = None,
    passes_authorization: bool = True,
    client: bytes | None = None,
) -> bytes:
    """Return the head of a request.

    Args:
        address: The backend.
        method: ``GET``, ``POST`` ...
        path: With the query, as it came.
        num_body_bytes: Length of the body.
        headers: The client's, names in lower case; those for the hop to this router are left out.
        authorization: In place of the client's.
        passes_authorization: Whether the client's is passed on otherwise.
        client: The client's IP address, added to ``X-Forwarded-For``.
    """
    headers = list(headers)
    dropped = NOT_SENT | _named_in_connection(headers)
    if authorization is not None or not passes_authorization:
        dropped |= {b"authorization"}
    lines = [b"%b %b%b HTTP/1.1" % (method, address.path.encode(), path), b"host: " + address.authority.encode()]
    lines += [b"%b: %b" % header for header in headers if header[0] not in dropped]
    if authorization is not None:
        lines.append(b"authorization: " + authorization)
    if client is not None:
        before = [value for name, value in headers if name == b"x-forwarded-for"]
        lines.append(b"x-forwarded-for: " + b", ".join([*before, client]))
    if num_body_bytes or method != b"GET":
        lines.append(b"content-length: %d" % num_body_bytes)
    return b"\r\n".join([*lines, b"", b""])


def answer_headers(headers: Headers) -> Headers:
    """Return the headers of an answer that the client gets."""
    dropped = NOT_RETURNED | _named_in_connection(headers)
    return [header for header in headers if header[0] not in dropped]


def _named_in_connection(headers: Headers) -> frozenset[bytes]:
    """Return the headers that ``Connection`` names as meant for this hop alone."""
    return frozenset(
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    )
