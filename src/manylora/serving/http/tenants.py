"""Tenants of a server: their keys, the models that they may call, their limits and weights, from a file of TOML.

::

    [tenants.acme]
    keys = [{ sha256 = "9f86d0...", expires = 2027-01-01T00:00:00Z }]   # of `manylora tenant key`
    models = ["base", "acme/*"]       # patterns of names; without it, all
    weight = 3.0                      # of its share, under --policy fair
    requests_per_minute = 600
    tokens_per_minute = 200000        # of prompts and answers
    concurrent_requests = 64          # answers under way
    adapters = 8                      # distinct adapters under way

The file has digests alone: a key has 256 random bits, so a plain SHA-256 reveals nothing of it, and a lookup by digest
compares no key byte by byte. It is read again when it changes and on SIGHUP. A file with a mistake changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import secrets
import signal
import tomllib
from collections.abc import Mapping
from datetime import datetime
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from manylora.core.errors import ConfigError
from manylora.core.types import MAX_TENANT_CHARS, WEIGHTS
from manylora.serving.http.rereading import stamp_of
from manylora.serving.http.room import CallerLimits

__all__ = ["Tenant", "TenantBook", "new_key", "routed_tenant"]

MAX_FILE_BYTES = 8 << 20
MAX_TENANTS, MAX_KEYS, MAX_MODELS = 10_000, 64, 1024

Limit = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Pattern = Annotated[str, Meta(min_length=1, max_length=600)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_OF_API_KEY = re.compile(r"key-[0-9a-f]{12}")
"""The name of an API key's caller, whose prefixes and room a tenant of that name would share."""

logger = logging.getLogger(__name__)


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key by its digest, and the time from which it is refused."""

    sha256: Digest
    expires: datetime | None = None


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A tenant; ``None`` for no limit."""

    name: str = ""
    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)] = ()
    models: Annotated[tuple[Pattern, ...], Meta(max_length=MAX_MODELS)] | None = None
    weight: Annotated[float, Meta(ge=WEIGHTS[0], le=WEIGHTS[1])] = 1.0
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    adapters: Limit | None = None

    @cached_property
    def limits(self) -> CallerLimits:
        """Its limits, for the room of callers."""
        return CallerLimits(
            requests=self.requests_per_minute,
            tokens=self.tokens_per_minute,
            num_answers=self.concurrent_requests,
            num_adapters=self.adapters,
        )

    @cached_property
    def _models(self) -> re.Pattern[str] | None:
        return None if self.models is None else re.compile("|".join(translate(one) for one in self.models))

    def may_call(self, model: str) -> bool:
        """Return whether it may see and call the base or adapter of that name."""
        return self._models is None or self._models.match(model) is not None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, Tenant]


class TenantBook:
    """The tenants of a file, as it was when last read without a mistake.

    ``find`` is for one thread; ``reread`` may run on another. ``ConfigError`` if the file cannot be read, or has a
    mistake; the message names the tenant, the field and the bound.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_name: Mapping[str, Tenant] = {}
        self._by_digest: Mapping[bytes, tuple[Tenant, float | None]] = {}
        self._read()

    def find(self, digest: bytes, now_s: float) -> Tenant | None:
        """Return the tenant with a key of this SHA-256 that has not expired; ``now_s`` is in seconds since 1970."""
        tenant, expires_s = self._by_digest.get(digest, (None, None))
        return tenant if expires_s is None or now_s < expires_s else None

    def reread(self, *, always: bool = False) -> None:
        """Read the file again if it has changed; a mistake is logged, and changes nothing."""
        try:
            if always or self._stamp != stamp_of(self._path):
                self._read()
                logger.info("tenants_read num=%d file=%s", len(self.by_name), self._path.name)
        except ConfigError as error:
            logger.error("tenants_kept num=%d error=%r", len(self.by_name), str(error))

    def reread_on_signal(self) -> None:
        """Read the file again on SIGHUP; call it from the main thread, on the event loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, functools.partial(self.reread, always=True))

    def _read(self) -> None:
        self._stamp = stamp_of(self._path)  # before it is read: a change meanwhile is seen the next time
        try:
            if (num_bytes := self._path.stat().st_size) > MAX_FILE_BYTES:
                raise ConfigError(
                    f"Got tenants = {str(self._path)!r} of {num_bytes} bytes, expected at most {MAX_FILE_BYTES}"
                )
            text = self._path.read_bytes().decode()
            by_name = _tenants(text)
        except OSError as error:
            raise ConfigError(f"Got tenants = {str(self._path)!r}, which cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"Got tenants = {str(self._path)!r}: {error}") from None
        by_digest: dict[bytes, tuple[Tenant, float | None]] = {}
        for tenant in by_name.values():
            for key in tenant.keys:
                if (other := by_digest.get(digest := bytes.fromhex(key.sha256))) is not None:
                    raise ConfigError(f"Got a key of both {other[0].name!r} and {tenant.name!r}, expected one tenant")
                by_digest[digest] = (tenant, None if key.expires is None else _seconds(tenant, key.expires))
        self.by_name, self._by_digest = by_name, by_digest


def _tenants(text: str) -> dict[str, Tenant]:
    found = msgspec.convert(tomllib.loads(text), _File).tenants
    if len(found) > MAX_TENANTS:
        raise ConfigError(f"Got {len(found)} tenants, expected at most {MAX_TENANTS}")
    for name, tenant in found.items():
        if len(name) > MAX_TENANT_CHARS or not _NAME.fullmatch(name) or _OF_API_KEY.fullmatch(name) or tenant.name:
            raise ConfigError(
                f"Got the tenant {name[:MAX_TENANT_CHARS]!r}, expected at most {MAX_TENANT_CHARS} letters, digits and "
                "._@+-, not the name of an API key, and no field name"
            )
    return {name: msgspec.structs.replace(tenant, name=name) for name, tenant in found.items()}


def _seconds(tenant: Tenant, expires: datetime) -> float:
    if expires.tzinfo is None:
        raise ConfigError(f"Got a key of {tenant.name!r} that expires {expires}, expected a time zone, such as a Z")
    return expires.timestamp()


def routed_tenant(named: str) -> Tenant | None:
    """Return the tenant that a router names, as ``acme;3``, with its weight; ``None`` if it is none."""
    name, _, weight = named.partition(";")
    try:
        made = msgspec.convert({"name": name, "weight": weight}, Tenant, strict=False)
    except msgspec.ValidationError:
        return None
    return made if len(name) <= MAX_TENANT_CHARS and _NAME.fullmatch(name) else None


def new_key() -> str:
    """Return a key of 256 random bits."""
    return f"ml-{secrets.token_urlsafe(32)}"
