"""The controller's process: ``python -m manylora.functions.controller.process``, with its set-up on standard input."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from manylora.core.errors import ConfigError, ManyloraError
from manylora.core.logs import configure_logging
from manylora.functions.controller.app import MEMBER, make_app
from manylora.functions.controller.controller import Controller
from manylora.functions.controller.credentials import server_context
from manylora.functions.controller.store import Store
from manylora.functions.deployment import read_deployment
from manylora.functions.wire import ControllerSetup
from manylora.serving.http.connections import ConnectionBounds
from manylora.serving.http.http_protocol import ChunkWritingProtocol
from manylora.serving.http.listening import HttpServer, bind, run_until_stopped, url_of

__all__ = ["LEDGER", "ControllerServer", "bind_guarded", "exit_code_of", "member_of", "run_controller"]

LEDGER = "ledger.db"
DRAIN_S = 5.0
MAX_CONNECTIONS = 512
"""Open connections; an agent has one, and makes another if an idle one is closed."""

logger = logging.getLogger(__name__)


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
        self.is_stopping = False
        self._app = make_app(controller, setup.token, has_adapters=setup.has_adapters)
        self._tls = None if setup.tls is None else server_context(setup.tls)
        self._http: HttpServer | None = None
        if setup.lifeline is not None:
            asyncio.get_running_loop().add_reader(setup.lifeline, os._exit, 1)  # its other end has gone

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

    Raises:
        ConfigError: The address can be reached from other machines, and callers need neither token nor certificate.
    """
    bound = bind(host, port)
    if not is_guarded and not ipaddress.ip_address(bound.getsockname()[0]).is_loopback:
        bound.close()
        raise ConfigError(f"Got host = {host!r} without token and certificate, expected either or a loopback address")
    return bound


def run_controller(setup: ControllerSetup) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Raises:
        ConfigError: The file of functions or the database is wrong, or it cannot listen.
    """

    def say_ready(one: ControllerServer) -> None:
        print(f"manylora controls functions at {one.url}", file=sys.stderr, flush=True)

    return run_until_stopped(lambda: ControllerServer(setup), say_ready, drain_timeout_s=DRAIN_S)


def exit_code_of(run: Callable[[], int]) -> int:
    """Return the exit code of a process: 2 if its configuration is wrong, which no restart mends."""
    try:
        return run()
    except ManyloraError as error:
        logger.error("process_failed error=%s", error)
        return 2 if isinstance(error, ConfigError) else 1


def main() -> int:
    """Run a controller; return the exit code."""
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=ControllerSetup)
    configure_logging(setup.log_level, "controller")
    return exit_code_of(lambda: run_controller(setup))


if __name__ == "__main__":
    sys.exit(main())
