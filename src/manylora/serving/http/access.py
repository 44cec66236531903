"""Around the application: a name for each HTTP request, a line in the log, and counts of responses.

A client may name its request (``X-Request-Id``). The name is sent back and logged, so that a request can be followed
through proxies and services. A name that could forge a line of a log, or fill it, is replaced.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["REQUEST_ID", "AccessLayer", "given_id", "request_id_of"]

REQUEST_ID = b"x-request-id"
_VALID = re.compile(rb"[\x21-\x7e]{1,128}")
_METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))

logger = logging.getLogger(__name__)


class AccessLayer:
    """The outermost ASGI application.

    Args:
        app: The application within.
        paths: Paths of all routes: the label of counts.
        routes: Those with names in them, by the function that answers.
        count: Called with method, route and status of each response.
        monotonic_s: Returns a time in seconds that never steps back.
        names_all: Send an id to clients that sent none, as vLLM's ``--enable-request-id-headers``.
        logs_all: Log every request when its response is complete; otherwise those that
            failed by a fault of the server.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: Collection[str],
        routes: Mapping[Any, str],
        count: Callable[[str, str, int], None],
        monotonic_s: Callable[[], float],
        names_all: bool = False,
        logs_all: bool = False,
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._routes = routes
        self._count = count
        self._monotonic_s = monotonic_s
        self._names_all = names_all
        self._logs_all = logs_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at = self._monotonic_s()
        given = given_id(scope["headers"])
        request_id = given or uuid.uuid4().hex.encode()
        scope["manylora.request_id"] = request_id.decode()
        is_named = given is not None or self._names_all
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if is_named:
                    message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            route = path if path in self._paths else self._routes.get(scope.get("endpoint"), "none")
            if status:
                self._count(method, route, status)
            if self._logs_all or status == 500:
                took_s = self._monotonic_s() - began_at
                logger.log(
                    logging.WARNING if status == 500 else logging.INFO,
                    "request method=%s route=%s status=%d took_s=%.4f request_id=%s",
                    *(method, route, status, took_s, scope["manylora.request_id"]),
                )


def request_id_of(scope: Scope) -> str:
    """Return the name of a request; empty outside of an ``AccessLayer``."""
    name: str = scope.get("manylora.request_id", "")
    return name


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the client's name of its request, if it is valid."""
    for name, value in headers:
        if name == REQUEST_ID:
            return value if _VALID.fullmatch(value) else None
    return None
