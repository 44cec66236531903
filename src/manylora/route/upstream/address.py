"""Addresses of backends: a URL, or a DNS name with many addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from manylora.core.errors import ConfigError

__all__ = ["Address", "parse_backend"]

DNS = {"dns": "http", "dns+https": "https"}
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A place where a server listens.

    Args:
        host: Name or IP address to connect to.
        name: The name in the ``Host`` header and of the certificate.
        path: Prefix of all routes, without a slash at its end.
        is_name_of_many: Whether each address of ``host`` is a backend of its own.
    """

    host: str
    name: str
    port: int
    is_tls: bool = False
    path: str = ""
    is_name_of_many: bool = False

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
        """Return one of the addresses of a name."""
        return replace(self, host=ip, is_name_of_many=False)


def parse_backend(text: str) -> Address:
    """Return the address of ``http://host:port/prefix`` (also with ``/v1``), ``host:port`` or ``dns:name:port``.

    Raises:
        ConfigError: It is none of them.
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
