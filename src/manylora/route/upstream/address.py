"""Addresses of backends (a URL, or a DNS name with many addresses), and the heads of requests and answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from manylora.core.errors import ConfigError
from manylora.route.upstream.connection import Headers
from manylora.serving.http.auth import TENANT_HEADER

__all__ = ["Address", "answer_headers", "parse_backend", "request_head"]

DNS = {"dns": "http", "dns+https": "https"}
PORTS = {"http": 80, "https": 443}

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-forwarded-for", TENANT_HEADER.encode()}
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A place where a server listens."""

    host: str  # name or IP address to connect to
    name: str  # the name in the ``Host`` header and of the certificate
    port: int
    is_tls: bool = False
    path: str = ""  # prefix of all routes, without a slash at its end
    is_name_of_many: bool = False  # whether each address of ``host`` is a backend of its own
    # The source of the key that it gets: ``file:PATH``, or ``key:`` and the key itself, so it is not shown.
    key_from: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """The URL, which names the backend in logs and metrics."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"

    @property
    def authority(self) -> str:
        """The value of the ``Host`` header."""
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    def at(self, ip: str) -> Address:
        """Return the address of a name's backend at an IP address."""
        return replace(self, host=ip, is_name_of_many=False)


def parse_backend(text: str) -> Address:
    """Return the address of ``http://host:port/prefix`` (also with ``/v1``), ``host:port`` or ``dns:name:port``.

    ``ConfigError`` if ``text`` has none of these forms.
    """
    kind, _, rest = text.partition(":")
    scheme = DNS.get(kind)
    whole = f"{scheme}://{rest}" if scheme is not None else text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    is_name = host and (":" in host or all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")))
    is_legal = is_name and port != 0 and whole.isascii() and whole.isprintable() and " " not in whole
    if not host or not is_legal or parts.scheme not in PORTS or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"Got backend = {text!r}, expected something like http://127.0.0.1:8000 or dns:vllm.default.svc:8000"
        )
    return Address(
        host=host,
        name=host,
        port=port or PORTS[parts.scheme],
        is_tls=parts.scheme == "https",
        path=parts.path.rstrip("/").removesuffix("/v1"),
        is_name_of_many=scheme is not None,
    )


def request_head(
    address: Address,
    method: bytes,
    path: bytes,  # with the query, as it came
    *,
    num_body_bytes: int,
    headers: Iterable[tuple[bytes, bytes]] = (),  # the client's, in lower case; those for the hop to here are left out
    authorization: bytes | None = None,  # in place of the client's
    passes_authorization: bool = True,  # the client's, otherwise
    client: bytes | None = None,  # its IP address, added to X-Forwarded-For
    tenant: bytes | None = None,  # with its weight, for backends; the client cannot name one
) -> bytes:
    """Return the head of a request."""
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
    if tenant is not None:
        lines.append(b"%b: %b" % (TENANT_HEADER.encode(), tenant))
    if num_body_bytes or method != b"GET":
        lines.append(b"content-length: %d" % num_body_bytes)
    return b"\r\n".join([*lines, b"", b""])


def answer_headers(headers: Headers) -> Headers:
    """Return the headers of an answer that the client gets."""
    dropped = NOT_RETURNED | _named_in_connection(headers)
    return [header for header in headers if header[0] not in dropped]


def _named_in_connection(headers: Headers) -> frozenset[bytes]:
    """Return the headers that ``Connection`` names as meant for one hop only."""
    return frozenset(
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    )
