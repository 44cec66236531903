"""URLs of adapters, and the prefixes that allow them.

A URL of a request is not trusted: it has a host, a path of plain characters, and nothing else. The text that is
compared with the prefixes is the one that is requested: percent signs, ``..``, user names and queries are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from manylora.core.errors import AdapterForbidden, ConfigError

__all__ = ["NO_REGISTRY", "check_registry", "host_of", "is_url", "resolve_url"]

MAX_URL_CHARS = 2048
NO_REGISTRY = "reading adapters from a registry is off; allow its URL with --lora-registry URL"
_PORTS = {"http": "80", "https": "443"}
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(?:/[A-Za-z0-9_.~@+=:,-]+)*)/?"
)


def is_url(path: str) -> bool:
    """Whether a path of an adapter is meant as a URL."""
    return path.startswith(("http://", "https://"))


def host_of(path: str) -> str | None:
    """Return the host and port in the URL of an adapter, ``None`` for a path on disk."""
    return path.split("/", 3)[2].lower() if is_url(path) else None


def check_registry(prefix: str) -> str:
    """Return the normal form of a value of ``--lora-registry``; ``ConfigError`` if it is no such URL."""
    if (normal := _normal(prefix)) is None:
        raise ConfigError(f"Got the URL {prefix[:256]!r} for adapters, expected one such as https://host/adapters/")
    return normal


def resolve_url(name: str, url: str, prefixes: Iterable[str]) -> str:
    """Return the normal form of a URL, without a slash at its end, which must lie below one of ``prefixes``.

    Args:
        name: The adapter, for messages.
        url: The URL of a folder or file.
        prefixes: Values of ``--lora-registry``.

    Raises:
        AdapterForbidden: It is malformed, or below none of them.
    """
    allowed = [check_registry(prefix) for prefix in prefixes]
    if not allowed:
        raise AdapterForbidden(name, NO_REGISTRY)
    normal = _normal(url)
    if normal is None:
        raise AdapterForbidden(
            name, "its URL may hold a host, a port and a path of letters, digits and _.~@+=:,- alone, without '..'"
        )
    if not any(normal == prefix or normal.startswith(prefix + "/") for prefix in allowed):
        raise AdapterForbidden(name, "its URL lies in no registry that --lora-registry allows")
    return normal


def _normal(url: str) -> str | None:
    match = _URL.fullmatch(url) if len(url) <= MAX_URL_CHARS else None
    if match is None or any(part in (".", "..") for part in match["path"].split("/")):
        return None
    port = "" if match["port"] in (None, _PORTS[match["scheme"]]) else f":{match['port']}"
    return f"{match['scheme']}://{match['host'].lower()}{port}{match['path']}"
