"""The controller's REST: reports of agents, functions, and a view of all.

::

    POST   /v1/nodes/NODE/report   Report -> Orders
    GET    /v1/functions           Overview
    GET    /v1/functions/NAME/logs the last lines that it has written
    PUT    /v1/functions/NAME      FunctionSpec
    DELETE /v1/functions/NAME
    GET    /health                 open

Every call but the last needs the token. With TLS, a node belongs to the certificate that reports for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import ManyloraError, RequestError
from manylora.functions.controller.controller import Controller
from manylora.functions.controller.members import MEMBER
from manylora.functions.deployment import FunctionSpec, check_folder
from manylora.functions.wire import MAX_REPORT_BYTES, NodeReport

__all__ = ["make_app"]

MAX_SPEC_BYTES = 64 << 10

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(controller: Controller, token: str | None, *, has_adapters: bool = False) -> Starlette:
    """Return the application.

    Args:
        controller: The controller.
        token: Of all calls; without one every caller is taken, which is for loopback alone.
        has_adapters: Whether the adapters are on this machine, so that one that cannot be read is refused.
    """
    expected = None if token is None else hashlib.sha256(token.encode()).digest()

    def checked(act: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                _check_token(request, expected)
                return _json(await act(request))
            except _Refusal as error:
                return _json({"error": str(error)}, error.status)
            except RequestError as error:
                return _json({"error": str(error), "param": error.param}, 409 if error.param is None else error.status)
            except ManyloraError as error:
                return _json({"error": str(error)}, error.status)

        return answer

    async def report(request: Request) -> Any:
        node = request.path_params["node"]
        if not 1 <= len(node) <= 128 or not node.isprintable():
            raise _Refusal(400, "Got a node's name that is empty, too long or not printable")
        told = await _body(request, NodeReport, MAX_REPORT_BYTES)
        return controller.report(node, told, member=request.scope.get(MEMBER))

    async def overview(request: Request) -> Any:
        return controller.overview()

    async def register(request: Request) -> Any:
        name, spec = request.path_params["name"], await _body(request, FunctionSpec, MAX_SPEC_BYTES)
        controller.check(name, spec)
        if has_adapters:
            await asyncio.to_thread(check_folder, name, spec)  # a disk that hangs holds up no report
        controller.register(name, spec)
        return {"name": name}

    async def remove(request: Request) -> Any:
        controller.remove(request.path_params["name"])
        return {"name": request.path_params["name"]}

    async def logs(request: Request) -> Any:
        return {"lines": controller.lines(request.path_params["name"])}

    async def health(request: Request) -> Response:
        return _json({"status": "serving"})

    return Starlette(
        routes=[
            Route("/v1/nodes/{node}/report", checked(report), methods=["POST"]),
            Route("/v1/functions", checked(overview), methods=["GET"]),
            Route("/v1/functions/{name:path}/logs", checked(logs), methods=["GET"]),
            Route("/v1/functions/{name:path}", checked(register), methods=["PUT"]),
            Route("/v1/functions/{name:path}", checked(remove), methods=["DELETE"]),
            Route("/health", health, methods=["GET"]),
        ]
    )


def _check_token(request: Request, expected: bytes | None) -> None:
    if expected is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    digest = hashlib.sha256(given.strip().encode()).digest()
    if scheme.lower() != "bearer" or not hmac.compare_digest(digest, expected):
        raise _Refusal(401, "The controller needs its token: send 'Authorization: Bearer <token>'.")


async def _body(request: Request, kind: type[T], max_bytes: int) -> T:
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _Refusal(413, f"Got a body of more than {max_bytes} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise _Refusal(400, "The body ended early") from None
    try:
        return msgspec.json.decode(b"".join(parts), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:  # its message names the field
        raise _Refusal(400, f"Got a wrong body: {error}") from None


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
