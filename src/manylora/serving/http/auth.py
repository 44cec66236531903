"""Access control: by API key, and of web pages where there is none.

* Inference routes accept any of ``api_keys``, the keys of tenants and the admin key; without any they are open.
* Admin routes accept ``admin_key``. Without one they accept ``api_keys``, of tenants none. Without keys they accept
  callers on this machine: a loopback peer without a proxy, and no web page (any site can make a browser on this
  machine send requests, so a foreign ``Origin`` and a ``Host`` that is not loopback are refused).
* A router's key is one for inference, and may name the tenant whose request it passes on (``routed_tenant``).
* Health and version are open, as probes expect. Metrics and load show the use of all tenants: with tenants, or with a
  metrics key, they need that key, the admin key or a router's, or where none of these is set a caller on this machine.

Keys are compared by digest in constant time, and never logged.

Requests that web pages of other sites make a browser on this machine send.

A server without keys that listens on a loopback address is open to every program of the machine, and a browser is one
that sends what any site asks for. A site whose name is made to lead to 127.0.0.1 (DNS rebinding) even reads the
answers, and is known by the ``Host`` of its requests; every other one by its ``Origin``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Collection, Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from manylora.serving.http.connections import client_of
from manylora.serving.http.errors import HttpError, error_response
from manylora.serving.http.room import NO_LIMITS, CallerLimits
from manylora.serving.http.tenants import Tenant, TenantBook, routed_tenant

__all__ = ["IS_ADMIN", "TENANT_HEADER", "Gate", "digest_of", "exposure", "is_loopback", "without_foreign_pages"]

TENANT_HEADER = "x-manylora-tenant"  # from a router: the name of a request's tenant, a semicolon and its weight

MAX_ROUTED = 10_000
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")

IS_ADMIN = "manylora.is_admin"
"""In the scope of a request that the live page has let in by its session: it is the administrator's."""


def exposure(api_keys: Collection[str], admin_key: str | None, *, has_address: bool = True) -> str | None:
    """Return the callers that may use the admin routes beside an administrator, in words; ``None`` if there are none.

    On a Unix socket (no ``has_address``) no caller is local.
    """
    if admin_key is not None or len(set(api_keys)) == 1:
        return None
    if api_keys:
        return (
            f"each of the {len(set(api_keys))} API keys may load and unload adapters: set --admin-key to prevent that"
        )
    if not has_address:
        return None
    return (
        "without a key every program on this machine may load and unload adapters, and so may all clients of a reverse "
        "proxy here that adds no X-Forwarded-For (nginx's proxy_pass alone adds none): behind a proxy set --admin-key"
    )


def digest_of(key: str) -> bytes:
    """Return the digest by which a key is known."""
    return hashlib.sha256(key.encode()).digest()


class Gate:
    """Checks the API key or the origin of a request, and names its tenant."""

    def __init__(
        self,
        api_keys: Iterable[str] = (),
        admin_key: str | None = None,
        *,
        tenants: TenantBook | None = None,
        router_key: str | None = None,
        metrics_key: str | None = None,
    ) -> None:
        self._api_keys = tuple(digest_of(key) for key in api_keys)
        self._admin_key = None if admin_key is None else digest_of(admin_key)
        self._router_key = None if router_key is None else digest_of(router_key)
        self._metrics_key = None if metrics_key is None else digest_of(metrics_key)
        self.tenants = tenants
        self._routed: dict[str, Tenant] = {}  # those that a router named
        self.has_tenants = tenants is not None or router_key is not None
        self.tells_tenants = self.has_tenants or len(set(self._api_keys)) > 1
        """Whether there are several API keys: one alone names no tenant among others."""
        self.asks_for_key = bool(self._api_keys) or admin_key is not None or tenants is not None
        """Whether there is any key; without one the administrator is a caller on this machine."""

    @property
    def administrator(self) -> bytes | None:
        """The digest of the administrator's key: the admin key, or the only API key; ``None`` if there is neither."""
        if self._admin_key is None and not self.tells_tenants and self._api_keys:
            return self._api_keys[0]
        return self._admin_key

    @property
    def is_keyed(self) -> bool:
        """Whether inference needs a key."""
        return bool(self._api_keys) or self.has_tenants

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of that name, of the file or named by a router; ``None`` for any other caller."""
        known = None if self.tenants is None else self.tenants.by_name.get(name)
        return known or self._routed.get(name)

    def limits_of(self, name: str) -> CallerLimits:
        """Return the limits of a caller of its own."""
        one = self.tenant(name)
        return NO_LIMITS if one is None else one.limits

    def check_inference(self, request: Request) -> str:
        """Return the tenant of an inference request: its name, or a digest of its key; empty without keys.

        A missing, wrong or expired key raises ``HttpError`` (401).
        """
        if not self.is_keyed:
            return ""
        given = self._bearer(request)
        if self.tenants is not None and (tenant := self.tenants.find(given, time.time())) is not None:
            return tenant.name
        if not self._matches(given, self._api_keys, self._admin_key, self._router_key):
            raise _unauthorized()
        named = request.headers.get(TENANT_HEADER)
        if named is not None and self._matches(given, (), self._router_key):
            return self._name_routed(named)
        return "key-" + given.hex()[:12]

    def _name_routed(self, named: str) -> str:
        """Return the name of the tenant that a router gives, and remember its weight."""
        tenant = routed_tenant(named)
        if tenant is None:
            raise HttpError(400, f"Got {TENANT_HEADER}: {named[:200]!r}, expected a tenant's name; and its weight")
        if self._routed.get(tenant.name) != tenant:
            if len(self._routed) >= MAX_ROUTED:
                self._routed.clear()  # each is named again by its next request
            self._routed[tenant.name] = tenant
        return tenant.name

    def caller_of(self, request: Request) -> str:
        """Return the name of an inference request's caller, among whom turns are shared: its tenant, else its address.

        Behind a proxy all callers have the proxy's address; of several keys each is a caller. An IPv6 network is one.
        A missing or wrong key raises ``HttpError`` (401).
        """
        tenant = self.check_inference(request)
        if self.tells_tenants or request.client is None:
            return tenant
        return client_of(request.client.host)

    def check_admin(self, request: Request) -> None:
        """Raise ``HttpError`` unless a request may use the admin routes.

        401 for no key or an unknown one; 403 for an inference key, or a caller that is not on this machine.
        """
        if IS_ADMIN in request.scope:
            return
        if self._admin_key is not None:
            given = self._bearer(request)
            if not self._matches(given, (), self._admin_key):
                if self._matches(given, self._api_keys, self._router_key) or self._is_of_tenant(given):
                    raise HttpError(403, "This key is for inference; the adapter routes need the admin key.")
                raise _unauthorized()
        elif self.is_keyed:
            self.check_inference(request)
            given = self._bearer(request)
            if self._is_of_tenant(given) or self._matches(given, (), self._router_key):
                raise HttpError(
                    403, "This key is for inference; the adapter routes need an admin key, which is not set."
                )
        else:
            self._check_local(request, "the adapter routes")

    def is_admin(self, request: Request) -> bool:
        """Return whether a request is the administrator's, and so sees paths of the server and every tenant's adapters.

        Of several keys without an admin key each may use the admin routes, and none sees more than its tenant.
        """
        if self._admin_key is None and self.tells_tenants:
            return False
        try:
            self.check_admin(request)
        except HttpError:
            return False
        return True

    def check_metrics(self, request: Request) -> None:
        """Raise ``HttpError`` unless a request may see figures of all tenants together.

        401 for no key or an unknown one; 403 for a tenant's key, or a caller that is not on this machine.
        """
        if self._metrics_key is None and not self.has_tenants:
            return
        keys = (self._metrics_key, self._admin_key, self._router_key)
        if not any(keys):
            self._check_local(request, "metrics of all tenants")
        elif not self._matches(given := self._bearer(request), (), *keys):
            if self._matches(given, self._api_keys) or self._is_of_tenant(given):
                raise HttpError(403, "This key is for inference; metrics of all tenants need the metrics key.")
            raise _unauthorized()

    def _check_local(self, request: Request, what: str) -> None:
        peer = request.client.host if request.client is not None else ""
        is_direct = not any(header in request.headers for header in FORWARDED)
        if not (is_loopback(peer) and is_direct):
            raise HttpError(
                403,
                f"Without an admin key {what} take calls from this machine only; "
                "start the server with an admin key to use them from elsewhere.",
            )
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        is_own_page = origin is None or origin == f"{request.scope['scheme']}://{host}"
        if not (is_loopback(host_name(host)) and is_own_page):
            raise HttpError(403, f"Without an admin key {what} take no calls from web pages.")

    def _bearer(self, request: Request) -> bytes:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized()
        return digest_of(key.strip())

    def _is_of_tenant(self, given: bytes) -> bool:
        return self.tenants is not None and self.tenants.find(given, time.time()) is not None

    def _matches(self, given: bytes, keys: Iterable[bytes], *others: bytes | None) -> bool:
        # All keys are compared, so that the time reveals no match.
        matches = [hmac.compare_digest(given, key) for key in (*keys, *others) if key is not None]
        return any(matches)


def is_loopback(host: str) -> bool:
    """Return whether a name or address leads to the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return the name or address in a ``Host`` header: ``[::1]:8000``, ``localhost:8000``, ``127.0.0.1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _unauthorized() -> HttpError:
    return HttpError(
        401,
        "This server needs an API key: send 'Authorization: Bearer <key>' with a valid one.",
        headers={"WWW-Authenticate": "Bearer"},
    )


LOCAL_ENDINGS = (".localhost", ".internal")  # ends of names that belong to no site; so do names without a dot


def without_foreign_pages(
    app: ASGIApp,
    *,
    host: str,
    is_keyed: bool,
    allowed_hosts: Collection[str],
    allowed_origins: Collection[str] = (),
) -> ASGIApp:
    """Return an application that refuses requests of foreign pages with 403.

    It is ``app`` itself where keys, or the address that it listens on (``host``), keep them out. ``allowed_hosts`` are
    more values of ``Host``, and ``allowed_origins`` pages that may call it, as in CORS; ``*`` is any.
    """
    if is_keyed or not is_loopback(host):
        return app
    hosts = frozenset((host.lower(), *(one.lower() for one in allowed_hosts)))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            named = origin = ""
            for name, value in scope["headers"]:
                if name == b"host":
                    named = value.decode("latin-1").lower()
                elif name == b"origin":
                    origin = value.decode("latin-1").lower()
            if not ("*" in hosts or _is_local(host_name(named)) or host_name(named) in hosts):
                message = (
                    f"The Host {named[:100]!r} is no name of this machine; --allowed-hosts allows it, or set a key."
                )
                await error_response(HttpError(403, message))(scope, receive, send)
                return
            if origin and not (
                origin == f"{scope['scheme']}://{named}"
                or "*" in allowed_origins
                or origin in allowed_origins
                or is_loopback(host_name(origin.partition("://")[2]))
            ):
                message = f"Web pages of {origin[:100]!r} may not call this server; --allowed-origins allows them."
                await error_response(HttpError(403, message))(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def _is_local(host: str) -> bool:
    return is_loopback(host) or host.endswith(LOCAL_ENDINGS) or not ("." in host or ":" in host)
