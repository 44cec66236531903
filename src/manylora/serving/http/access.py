"""Around the application: a name for each HTTP request, a line in the log, counts of responses, and cheap refusals.

A client may name its request (``X-Request-Id``). The name is sent back and logged, so that a request can be followed
through proxies and services. A name that could forge a line of a log, or fill it, is replaced.

An overloaded server refuses most of its requests, so the price of a refusal decides how many answers it still gives.
``Refusals`` answers a request beyond all room from its headers: a look at the engines' room, or at that of the tenant,
and one write. No body is kept, no route runs, and no line is logged for each. Only plain requests are refused so; any
other goes to its route, which refuses it as well (``check_room``).
"""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.core.errors import CapacityError
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError, error_body
from manylora.serving.http.room import CallerRoom

__all__ = ["MOST_BODY_BYTES", "MOST_RETRY_S", "AccessLayer", "Refusals", "RetryTimes", "request_id_of"]

REQUEST_ID = b"x-request-id"

MOST_BODY_BYTES = 1 << 18  # a larger body is not waited for: its route answers before it has arrived

MOST_RETRY_S = 60
LOG_EVERY_S = 10.0

_VALID = re.compile(rb"[\x21-\x7e]{1,128}")
_METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
_UNUSUAL = frozenset((b"expect", b"origin", b"transfer-encoding", b"upgrade"))
"""Headers that ask for more than an answer; ``Origin`` for headers of another layer."""

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class AccessLayer:
    """The outermost ASGI application."""

    app: ASGIApp  # the application within
    paths: Collection[str]  # paths of all routes: the label of counts
    routes: Mapping[Any, str]  # those with names in them, by the function that answers
    count: Callable[[str, str, int], None]  # called with method, route and status of each response
    monotonic_s: Callable[[], float]  # returns a time in seconds that never steps back
    names_all: bool = False  # send an id to clients that sent none, as vLLM's ``--enable-request-id-headers``
    logs_all: bool = False  # log every request when its response is complete, not only those the server failed on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_at = self.monotonic_s()
        given = _given_id(scope["headers"])
        request_id = given or uuid.uuid4().hex.encode()
        scope["manylora.request_id"] = request_id.decode()
        is_named = given is not None or self.names_all
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if is_named:
                    message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            route = path if path in self.paths else self.routes.get(scope.get("endpoint"), "none")
            if status:
                self.count(method, route, status)
            if self.logs_all or status == 500:
                took_s = self.monotonic_s() - began_at
                logger.log(
                    logging.WARNING if status == 500 else logging.INFO,
                    "request method=%s route=%s status=%d took_s=%.4f request_id=%s",
                    *(method, route, status, took_s, scope["manylora.request_id"]),
                )


def request_id_of(scope: Scope) -> str:
    """Return the ID of a request for logs and errors; an empty text if no ``AccessLayer`` gave it one."""
    name: str = scope.get("manylora.request_id", "")
    return name


def _given_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the client's name of its request, if it is valid."""
    for name, value in headers:
        if name == REQUEST_ID:
            return value if _VALID.fullmatch(value) else None
    return None


class RetryTimes:
    """Tells refused clients when to try again, so that they come back one by one, at the rate of service.

    Each is told a place in a line, one place after the client before it. A line of a minute begins anew, because a
    client that waits longer gives up.

    ::

        refused     a b c d e f          at once
        told        1 1 2 2 3 3 s        with two places a second
    """

    def __init__(self) -> None:
        self._last_at = 0.0  # the place that was told last

    def after_s(self, error: CapacityError, now: float) -> int:
        """Return ``Retry-After`` of a refusal, in whole seconds."""
        if not error.every_s:
            return max(1, math.ceil(error.retry_after_s))
        first_at = now + error.retry_after_s
        place_at = max(first_at, self._last_at + error.every_s)
        self._last_at = first_at if place_at > now + MOST_RETRY_S else place_at
        return min(MOST_RETRY_S, max(1, math.ceil(self._last_at - now)))


@dataclass(kw_only=True, slots=True)
class Refusals:
    """Decides from a request's headers whether it is refused, and makes the answer."""

    paths: Collection[str]  # paths of the routes that need room
    check_room: Callable[[], None]  # raises ``CapacityError`` if every engine is full
    callers: CallerRoom  # the room of each caller
    gate: Gate  # checks API keys: a caller with a wrong one learns of that first
    retries: RetryTimes  # chooses ``Retry-After``
    count: Callable[[str, str, int], None]  # called with method, route and status of each refusal
    count_refusal: Callable[[CapacityError], None] = lambda error: None  # called with each as well
    monotonic_s: Callable[[], float]  # returns a time in seconds that never steps back
    names_all: bool  # name each answer, also to clients that sent no name
    _num_unlogged: int = 0
    _logged_at: float = -math.inf

    def answer(self, url: bytes, headers: Headers) -> bytes | None:
        """Return the refusal of a POST after its status line, a 429; ``None`` if its route decides.

        The path is as it was sent; names of headers are in lower case.
        """
        path = url.decode("latin-1")
        if path not in self.paths:
            return None
        try:
            self.check_room()
            if self.callers.is_any_full and (tenant := self._tenant(headers)) is not None:
                self.callers.check(tenant)
        except CapacityError as error:
            if error.status != 429 or self._tenant(headers) is None:
                return None
            return self._refuse(path, headers, error)
        return None

    def _tenant(self, headers: Headers) -> str | None:
        """Return the tenant of a request for an answer alone, with a body of a bounded length; ``None`` of another."""
        num_bytes = b""
        for name, value in headers:
            if name in _UNUSUAL:
                return None
            if name == b"content-length":
                num_bytes = value
        if not num_bytes.isdigit() or int(num_bytes) > MOST_BODY_BYTES:
            return None
        try:
            return self.gate.check_inference(Request({"type": "http", "headers": headers}))
        except HttpError:
            return None

    def _refuse(self, path: str, headers: Headers, error: CapacityError) -> bytes:
        self.count("POST", path, error.status)
        self.count_refusal(error)
        now = self.monotonic_s()
        self._log(now)
        body = msgspec.json.encode(error_body(error))
        name = _given_id(headers) or (uuid.uuid4().hex.encode() if self.names_all else None)
        return b"retry-after: %d\r\n%bcontent-type: application/json\r\n" % (
            self.retries.after_s(error, now),
            b"" if name is None else b"%b: %b\r\n" % (REQUEST_ID, name),
        ) + b"content-length: %d\r\n\r\n%b" % (len(body), body)

    def _log(self, now: float) -> None:
        """Log the number of refusals, at most once in a while."""
        self._num_unlogged += 1
        if now - self._logged_at >= LOG_EVERY_S:
            logger.info("requests_refused num=%d", self._num_unlogged)
            self._num_unlogged, self._logged_at = 0, now
