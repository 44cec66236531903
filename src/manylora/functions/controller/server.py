"""The controller's server: its REST, and its process with the set-up on standard input.

::

    POST   /v1/nodes/NODE/report   NodeReport -> Orders
    GET    /v1/functions           Overview
    GET    /v1/functions/NAME/logs the last lines that it has written
    PUT    /v1/functions/NAME      FunctionSpec
    DELETE /v1/functions/NAME
    GET    /health                 open

Every call but the last needs the token. With TLS, a node belongs to the certificate that reports for it.

The process is ``python -m manylora.functions.controller.server``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from manylora.core.errors import ConfigError, ManyloraError, RequestError
from manylora.core.logs import configure_logging
from manylora.functions.controller.controller import Controller
from manylora.functions.controller.credentials import tls_context
from manylora.functions.controller.store import Store
from manylora.functions.deployment import FunctionSpec, check_folder, read_deployment
from manylora.functions.wire import MAX_REPORT_BYTES, AgentSetup, ControllerSetup, NodeReport
from manylora.serving.http.auth import Gate
from manylora.serving.http.connections import ConnectionBounds
from manylora.serving.http.errors import HttpError, json_response
from manylora.serving.http.http_protocol import ChunkWritingProtocol
from manylora.serving.http.listening import HttpServer, bind, run_until_stopped, url_of
from manylora.serving.http.room import short_struct
from manylora.serving.http.tls import ServerTls

__all__ = ["LEDGER", "ControllerServer", "bind_guarded", "make_app", "member_of", "run_controller", "run_process"]

LEDGER = "ledger.db"
ADDRESS = "controller.json"  # in the folder of state, where commands find the controller
MEMBER = "manylora.member"  # key of a request's scope: the names in the caller's certificate

MAX_SPEC_BYTES = 64 << 10
DRAIN_S = 5.0
MAX_CONNECTIONS = 512  # open connections; an agent has one, and makes another if an idle one is closed

Act: TypeAlias = Callable[[Controller, Request], Awaitable[Any]]
SetupT = TypeVar("SetupT", AgentSetup, ControllerSetup)

logger = logging.getLogger(__name__)


def make_app(controller: Controller, token: str | None, *, has_adapters: bool = False) -> Starlette:
    """Return the application.

    Without a token every caller is taken, which is for loopback alone. If it ``has_adapters``, they are on this
    machine, and one that cannot be read is refused.
    """
    gate = Gate(() if token is None else (token,))

    def route(method: str, path: str, act: Act) -> Route:
        async def answer(request: Request) -> Response:
            try:
                _check_token(gate, request)
                return json_response(await act(controller, request))
            except RequestError as error:
                return json_response(
                    {"error": str(error), "param": error.param}, 409 if error.param is None else error.status
                )
            except ManyloraError as error:
                return json_response({"error": str(error)}, error.status)

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
    report = await short_struct(request, NodeReport, MAX_REPORT_BYTES)
    return controller.report(node, report, member=request.scope.get(MEMBER))


async def _overview(controller: Controller, request: Request) -> Any:
    return controller.overview()


async def _logs(controller: Controller, request: Request) -> Any:
    return {"lines": controller.lines(request.path_params["name"])}


async def _register(controller: Controller, request: Request, *, has_adapters: bool) -> Any:
    name, spec = request.path_params["name"], await short_struct(request, FunctionSpec, MAX_SPEC_BYTES)
    controller.check(name, spec)
    if has_adapters:
        await asyncio.to_thread(check_folder, name, spec)  # a disk that hangs holds up no report
    controller.register(name, spec)
    return {"name": name}


async def _remove(controller: Controller, request: Request) -> Any:
    controller.remove(request.path_params["name"])
    return {"name": request.path_params["name"]}


async def _health(request: Request) -> Response:
    return json_response({"status": "serving"})


class ControllerServer:
    """A controller behind HTTP, from start to stop, on one event loop."""

    def __init__(self, setup: ControllerSetup) -> None:
        deployment = read_deployment(Path(setup.config))
        self._store = Store(Path(setup.folder) / LEDGER)
        controller = Controller(
            self._store, deployment, now=time.monotonic, api_keys=setup.api_keys, admin_key=setup.admin_key
        )
        self._socket = (
            bind_guarded(setup.host, setup.port, is_guarded=setup.token is not None or setup.tls is not None)
            if setup.socket is None
            else socket.socket(fileno=setup.socket)
        )
        self.url = url_of(self._socket, is_tls=setup.tls is not None)
        if setup.socket is not None:  # only the controller that has the ledger says where it is
            (Path(setup.folder) / ADDRESS).write_text(json.dumps({"url": self.url}))
        self.is_stopping = False
        self._app = make_app(controller, setup.token, has_adapters=setup.has_adapters)
        self._tls = None
        if (tls := setup.tls) is not None:
            self._tls = ServerTls(partial(tls_context, tls, ssl.PROTOCOL_TLS_SERVER), (tls.cert, tls.key, tls.ca))
        self._http: HttpServer | None = None
        if setup.parent_pipe is not None:
            asyncio.get_running_loop().add_reader(setup.parent_pipe, os._exit, 1)  # its other end has gone

    def drain(self) -> None:
        """Begin to stop."""
        self.is_stopping = True
        if self._http is not None:
            self._http.should_exit = True

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until drained."""
        self._http = HttpServer(
            self._app,
            ConnectionBounds(max_connections=MAX_CONNECTIONS, max_per_address=MAX_CONNECTIONS // 2),
            on_ready,
            drain_s=DRAIN_S,
            protocol=MemberProtocol,
            tls=self._tls,
        )
        self._http.should_exit = self.is_stopping
        try:
            await self._http.serve(sockets=[self._socket])
        finally:
            self._store.close()


class MemberProtocol(ChunkWritingProtocol):
    """The server's protocol, whose requests have the names in the caller's certificate in their scope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note the certificate, which the handshake has checked."""
        super().connection_made(transport)
        app, member = self.app, member_of(transport.get_extra_info("peercert") or {})

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            scope[MEMBER] = member
            await app(scope, receive, send)

        self.app = named


def member_of(certificate: Mapping[str, Any]) -> str | None:
    """Return the names in a certificate, as Python's ``ssl`` gives it; ``None`` for none.

    They outlive a renewal. Those of the subject count only without names of hosts or addresses.
    """
    names = certificate.get("subjectAltName") or [pair for part in certificate.get("subject", ()) for pair in part]
    return ", ".join(sorted(f"{kind}:{name}" for kind, name in names)) or None


def bind_guarded(host: str, port: int, *, is_guarded: bool) -> socket.socket:
    """Return a bound socket.

    ``ConfigError`` if the address can be reached from other machines, and callers need neither token nor certificate.
    """
    bound = bind(host, port)
    if not is_guarded and not ipaddress.ip_address(bound.getsockname()[0]).is_loopback:
        bound.close()
        raise ConfigError(f"Got host = {host!r} without token and certificate, expected either or a loopback address")
    return bound


def run_controller(setup: ControllerSetup) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    ``ConfigError`` if the file of functions or the database is wrong, or it cannot listen.
    """

    def say_ready(one: ControllerServer) -> None:
        print(f"manylora controls functions at {one.url}", file=sys.stderr, flush=True)

    return run_until_stopped(lambda: ControllerServer(setup), say_ready, drain_timeout_s=DRAIN_S)


def run_process(role: str, kind: type[SetupT], run: Callable[[SetupT], int]) -> int:
    """Run a process of the platform by the set-up on its standard input; return the exit code.

    It is 2 if its configuration is wrong, which no restart mends.
    """
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    configure_logging(setup.log_level, role)
    try:
        return run(setup)
    except ManyloraError as error:
        logger.error("process_failed error=%s", error)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(run_process("controller", ControllerSetup, run_controller))
