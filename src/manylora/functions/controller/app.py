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
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import ManyloraError, RequestError
from manylora.functions.controller.controller import Controller
from manylora.functions.deployment import FunctionSpec, check_folder
from manylora.functions.wire import MAX_REPORT_BYTES, NodeReport
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError

__all__ = ["MEMBER", "make_app"]

MEMBER = "manylora.member"
"""Key of a request's scope: the names in the caller's certificate."""

MAX_SPEC_BYTES = 64 << 10

Act: TypeAlias = Callable[[Controller, Request], Awaitable[Any]]
T = TypeVar("T")


def make_app(controller: Controller, token: str | None, *, has_adapters: bool = False) -> Starlette:
    """Return the application.

    Args:
        controller: The controller.
        token: The token of all calls; without one every caller is taken, which is for loopback alone.
        has_adapters: Whether the adapters are on this machine, so that one that cannot be read is refused.
    """
    gate = Gate(() if token is None else (token,))

    def route(method: str, path: str, act: Act) -> Route:
        async def answer(request: Request) -> Response:
            try:
                _check_token(gate, request)
                return _json(await act(controller, request))
            except RequestError as error:
                return _json({"error": str(error), "param": error.param}, 409 if error.param is None else error.status)
            except ManyloraError as error:
                return _json({"error": str(error)}, error.status)

        return Route(path, answer, methods=[method])

    return Starlette(
        routes=[
            route("POST", "/v1/nodes/{node}/report", _report),
            route("GET", "/v1/functions", _overview),
            route("GET", "/v1/functions/{name:path}/logs", _logs),
            route("PUT", "/v1/functions/{name:path}", partial(_register, has_adapters=has_adapters)),
            route("DELETE", "/v1/functions/{name:path}", _remove),
            Route("/health", _health, methods=["GET"]),
        ]
    )


def _check_token(gate: Gate, request: Request) -> None:
    try:
        gate.check_inference(request)
    except HttpError as error:
        message = "The controller needs its token: send 'Authorization: Bearer <token>'."
        raise HttpError(error.status, message) from None


async def _report(controller: Controller, request: Request) -> Any:
    node = request.path_params["node"]
    if not 1 <= len(node) <= 128 or not node.isprintable():
        raise HttpError(400, f"Got a node's name of {len(node)} characters, expected 1 to 128 printable ones")
    report = await _body(request, NodeReport, MAX_REPORT_BYTES)
    return controller.report(node, report, member=request.scope.get(MEMBER))


async def _overview(controller: Controller, request: Request) -> Any:
    return controller.overview()


async def _logs(controller: Controller, request: Request) -> Any:
    return {"lines": controller.lines(request.path_params["name"])}


async def _register(controller: Controller, request: Request, *, has_adapters: bool) -> Any:
    name, spec = request.path_params["name"], await _body(request, FunctionSpec, MAX_SPEC_BYTES)
    controller.check(name, spec)
    if has_adapters:
        await asyncio.to_thread(check_folder, name, spec)  # a disk that hangs holds up no report
    controller.register(name, spec)
    return {"name": name}


async def _remove(controller: Controller, request: Request) -> Any:
    controller.remove(request.path_params["name"])
    return {"name": request.path_params["name"]}


async def _health(request: Request) -> Response:
    return _json({"status": "serving"})


async def _body(request: Request, kind: type[T], max_bytes: int) -> T:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise HttpError(413, f"Got a body of more than {max_bytes} bytes")
        return msgspec.json.decode(body, type=kind)
    except ClientDisconnect:
        raise HttpError(400, "The body ended early") from None
    except (msgspec.MsgspecError, RecursionError) as error:  # its message names the field
        raise HttpError(400, f"Got a wrong body: {error}") from None


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
