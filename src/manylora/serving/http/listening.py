"""A listening socket, uvicorn on it, and the event loop of both: for the server, the router, agents and controller."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp

from manylora.core.errors import ConfigError
from manylora.serving.http.acceptor import Acceptor
from manylora.serving.http.connections import ConnectionBounds
from manylora.serving.http.http_protocol import ChunkWritingProtocol
from manylora.serving.http.rereading import keep_reading
from manylora.serving.http.tls import ServerTls

__all__ = [
    "BACKLOG",
    "EXIT_FORCED",
    "HttpServer",
    "Stoppable",
    "bind",
    "bind_unix",
    "new_event_loop",
    "run_until_stopped",
    "url_of",
]

EXIT_FORCED = 130
BACKLOG = 512  # connections that wait for a process which starts again

SWITCH_S = 0.0005
"""Longest that another thread keeps Python's lock from the event loop's, a tenth of the default.

A request takes the lock several times, and a thread that renders a template has it almost all the time.
"""

logger = logging.getLogger(__name__)


ServerT = TypeVar("ServerT", bound="Stoppable")


class HttpServer(uvicorn.Server):
    """uvicorn with our protocol and bounds on its connections, for every server in the house; without its signals."""

    def __init__(
        self,
        app: ASGIApp,
        bounds: ConnectionBounds,
        on_listening: Callable[[], None],  # clients can connect
        *,
        drain_s: float,  # time that answers under way have once it stops
        protocol: Callable[..., asyncio.Protocol] = ChunkWritingProtocol,
        tls: ServerTls | None = None,  # its files are read again when they change
        root_path: str = "",  # below which a proxy serves the application
        on_shutdown: Callable[[], None] = lambda: None,  # the last connection is closed
    ) -> None:
        config = uvicorn.Config(
            app,
            http=functools.partial(protocol, bounds=bounds),  # type: ignore[arg-type]
            interface="asgi3",
            root_path=root_path,
            backlog=bounds.backlog,
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # a forwarded request is not local; see auth
            server_header=False,
            timeout_keep_alive=bounds.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=max(1, int(drain_s)),
        )
        config.load()
        super().__init__(config)
        self._bounds = bounds
        self._tls = tls
        self._watching: asyncio.Task[None] | None = None
        self._on_listening = on_listening
        self._on_shutdown = on_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call ``on_listening``."""
        await self.lifespan.startup()
        self.servers = [await self._accept(one) for one in sockets or ()]  # type: ignore[misc]
        if self._tls is not None:
            self._watching = asyncio.create_task(keep_reading(self._tls.reread))
        self.started = True
        self._on_listening()

    async def _accept(self, listening: socket.socket) -> Acceptor | asyncio.Server:
        config = self.config
        protocol: Callable[..., asyncio.Protocol] = config.http_protocol_class
        make = functools.partial(protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        if listening.family == socket.AF_UNIX:  # its callers have no address to take turns by
            loop = asyncio.get_running_loop()
            tls = None if self._tls is None else self._tls.for_listening()
            return await loop.create_unix_server(make, sock=listening, ssl=tls, backlog=config.backlog)
        return Acceptor(
            listening,
            make,
            bounds=self._bounds,
            num_open=self.server_state.connections.__len__,
            backlog=config.backlog,
            tls=None if self._tls is None else self._tls.present,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections, then call ``on_shutdown``."""
        try:
            await super().shutdown(sockets)
        finally:
            if self._watching is not None:
                self._watching.cancel()
            self._on_shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command."""
        yield


class Stoppable(Protocol):
    """A server, as ``run_until_stopped`` drives it."""

    def drain(self) -> None:
        """Begin to stop: requests under way may finish."""

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until drained; call ``on_ready`` once it does."""


def run_until_stopped(
    make: Callable[[], ServerT], on_ready: Callable[[ServerT], None], *, drain_timeout_s: float
) -> int:
    """Serve until SIGTERM or SIGINT, on an event loop of its own; call it from the main thread.

    The first signal drains, the second exits at once; processes that serve this one end with their standard input.

    ``make`` makes the server, on the loop; ``drain_timeout_s`` is for the message. Return 0 after a graceful stop.
    """

    async def serve() -> None:
        server = make()
        was_asked = False  # by a signal: it may drain for another cause before

        def stop() -> None:
            nonlocal was_asked
            if was_asked:
                os._exit(EXIT_FORCED)
            was_asked = True
            logger.warning("draining timeout_s=%.1f (again to exit at once)", drain_timeout_s)
            server.drain()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.serve(lambda: on_ready(server))

    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve())
    return 0


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop if it is installed: its socket writes cost half as much."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Return a bound socket; ``ConfigError`` for a port in use is raised before a model is loaded.

    Port 0 picks a free one. With ``reuse_port`` it is shared with other processes that ask for it too, so that one can
    replace another.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Got host = {host!r}, expected an address to listen on: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "another process listens there; choose another port, or 0 for a free one"
        raise ConfigError(f"Got host = {host!r} and port = {port}, which cannot be listened on: {reason}") from error
    return bound


def bind_unix(path: str, mode: int) -> socket.socket:
    """Return a Unix socket bound to a path, in place of one that no process listens on, or raise ``ConfigError``.

    The file has the permissions ``mode`` from the first moment on.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"Got uds = {path!r}, where another process listens")
            os.unlink(path)
        before = os.umask(0o777 & ~mode)
        try:
            bound.bind(path)
        finally:
            os.umask(before)
    except OSError as error:
        bound.close()
        raise ConfigError(f"Got uds = {path!r}, which cannot be listened on: {error.strerror or error}") from error
    except ConfigError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket, *, is_tls: bool = False) -> str:
    """Return the address at which this machine reaches the server."""
    scheme = "https" if is_tls else "http"
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
