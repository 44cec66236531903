"""Start and stop of the router.

::

    bind -> backends polled once -> listen -> serve
         -> SIGHUP, or another file of options: backends and public names change
         -> first signal: stop to listen, requests under way may finish -> exit 0
         -> second signal: exit at once

With several workers each process does so on a socket of its own; ``workers.py`` starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from random import Random

from manylora.core.errors import ConfigError
from manylora.core.routing import RouterContext, make_router
from manylora.route.app import PASSED_ON, RouterRoutes, make_app
from manylora.route.choice import Choice
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import AdapterPlacement, RoutedAdapters
from manylora.route.fleet.changes import BackendChanges
from manylora.route.fleet.kubernetes import Cluster
from manylora.route.fleet.members import Backends
from manylora.route.fleet.names import parse_names
from manylora.route.fleet.polls import Polls
from manylora.route.fleet.sources import Resolve, Sources, parse_source, resolve
from manylora.route.metrics import ProxyMetrics
from manylora.route.outbox import WorkerOutbox
from manylora.route.peers import Peers
from manylora.route.relay.relay import Relay
from manylora.route.relay.selection import Selection
from manylora.route.relay.tenants import RoutedTenants
from manylora.route.upstream.pool import backend_tls
from manylora.route.workers import RouteWorker, start_workers
from manylora.serving.http.auth import Gate
from manylora.serving.http.connections import ConnectionBounds, within_open_files
from manylora.serving.http.listening import HttpServer, bind, run_until_stopped, url_of
from manylora.serving.http.rereading import REREAD_S, keep_reading, stamp_of
from manylora.serving.http.tenants import TenantBook
from manylora.serving.http.tls import server_tls
from manylora.serving.http.traces import TraceLayer, sent_traces
from manylora.serving.metrics.usage import UsageLedger

__all__ = ["Proxy", "max_connections", "run"]

MAX_CONNECTIONS = 2**16  # in all, and of one address, which may be that of a balancer; fewer by the limit of open files
FILES_BESIDE_CONNECTIONS = 64  # files that the router opens beside connections
KEEP_ALIVE_S = 75.0  # time that an idle connection of a client stays open
BACKLOG = 4096  # connections that wait in the kernel to be accepted
RELOADED = ("backends", "names")  # options that another configuration changes in a router that runs

logger = logging.getLogger(__name__)


class Proxy:
    """One router, from start to stop, on one event loop.

    ``resolve`` looks DNS names up; the ``environment`` has keys of backends; ``worker`` is which of several workers it
    is. ``ConfigError`` if an address or a router is wrong, or it cannot listen.
    """

    def __init__(
        self,
        config: ProxyConfig,
        *,
        resolve: Resolve = resolve,
        environment: Mapping[str, str] | None = None,
        worker: RouteWorker | None = None,
    ) -> None:
        for text in config.backends:
            parse_source(text, environment or {})
        rng, ranks = Random(), dict[str, int]()
        context = RouterContext(rng=rng, ranks=ranks, max_num_seqs=config.max_in_flight)
        outbox = None if worker is None else WorkerOutbox()
        choice = Choice(make_router(config.router, context, config.router_options), ranks, outbox)
        self.metrics = metrics = ProxyMetrics()
        self.backends = Backends(config, choice)
        changes = BackendChanges(config, self.backends)
        placement = AdapterPlacement(config, self.backends, changes)
        adapters = RoutedAdapters(self.backends, changes, placement)
        self._polls = Polls(config, self.backends, adapters, choice, metrics, rng=rng)
        cluster = Cluster(config.kubernetes_api, config.kubernetes_account, again_s=config.resolve_s, rng=rng)
        self._sources = Sources(config.resolve_s, resolve, cluster.watch, self._polls.update, environment or {}, outbox)
        self.backends.catalog.rename(parse_names(config.names))
        selection = Selection(config, self.backends, choice, changes, placement)
        self.tenants = None if config.tenants is None else TenantBook(Path(config.tenants).expanduser())
        self._usage = None if config.usage is None else UsageLedger(Path(config.usage).expanduser())
        gate = Gate(config.api_keys, config.admin_key, tenants=self.tenants, metrics_key=config.metrics_key)
        tenants = None if self.tenants is None else RoutedTenants(config, gate, self.backends, self._usage, outbox)
        relay = Relay(config, gate, self.backends, selection, placement, metrics, tenants)
        self._peers: Peers | None = None
        if worker is not None and outbox is not None:
            self._peers = Peers(worker, outbox, choice, self.backends, self._sources, metrics, tenants)
        render = self._own_metrics if self._peers is None else self._peers.metrics
        self._routes = RouterRoutes(config, gate, self.backends, adapters, render, self._sources)
        self._app = make_app(config, relay, self._routes)
        if config.backend_ca_certs is not None:
            backend_tls(config.backend_ca_certs)  # names of backends may be looked up later
        self._tls = server_tls(config.tls)
        self._traces = sent_traces(config.traces, "manylora-route")
        if self._traces is not None:
            self._app = TraceLayer(self._app, self._traces, PASSED_ON)
        self._config = config
        self._http: HttpServer | None = None
        self._starting: asyncio.Task[None] | None = None
        self.is_stopping = False
        self._socket = worker.bound if worker is not None else bind_port(config)
        self.url = url_of(self._socket, is_tls=self._tls is not None)

    def drain(self) -> None:
        """Begin to stop: the router no longer listens, and requests under way may finish."""
        self.is_stopping = self._routes.is_stopping = True
        if self._http is None:
            self._socket.close()  # it starts, and will not listen
            if self._starting is not None:
                self._starting.cancel()
        else:
            self._http.should_exit = True

    async def configure(self, config: ProxyConfig) -> None:
        """Take over the backends and the public names of another configuration; its other options wait for a restart.

        ``ConfigError`` if one of them is malformed; nothing has changed.
        """
        names = parse_names(config.names)
        await self._sources.configure(config.backends)
        self.backends.catalog.rename(names)
        waiting = [
            one.name
            for one in fields(config)
            if one.name not in RELOADED and getattr(config, one.name) != getattr(self._config, one.name)
        ]
        logger.info("reloaded backends=%d names=%d", len(self.backends), len(names))
        if waiting:
            logger.warning("reload_needs_restart options=%s", ",".join(waiting))

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until drained."""
        self._starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait({self._starting})
            if not self._starting.cancelled():  # by a stop
                self._starting.result()
        except BaseException:
            self._starting.cancel()
            self._socket.close()
            raise
        watching: list[asyncio.Task[None]] = []
        if self.tenants is not None:
            watching.append(asyncio.create_task(keep_reading(self.tenants.reread)))
        if self._usage is not None:
            watching.append(asyncio.create_task(self._usage.run()))
        most = max_connections()
        bounds = ConnectionBounds(
            max_connections=most, max_per_address=most, keep_alive_s=KEEP_ALIVE_S, backlog=BACKLOG
        )
        self._http = HttpServer(self._app, bounds, on_ready, drain_s=self._config.drain_timeout_s, tls=self._tls)
        try:
            if not self.is_stopping:
                await self._http.serve(sockets=[self._socket])
        finally:
            for task in watching:
                task.cancel()
            if self._peers is not None:
                await self._peers.stop()
            await self._sources.stop()
            await self._polls.stop()
            if self._traces is not None:
                await self._traces.close()
            if self._usage is not None:
                await self._usage.close()

    async def _start(self) -> None:
        await self._sources.configure(self._config.backends)
        if self._peers is not None:
            await self._peers.start()
        await self._polls.start()

    async def _own_metrics(self) -> bytes:
        return self.metrics.render(self.backends)


def bind_port(config: ProxyConfig) -> socket.socket:
    """Return a socket on the port of the router; ``ConfigError`` if there is none to be had."""
    return bind(config.host, config.port, reuse_port=config.reuse_port)


def bind_workers(config: ProxyConfig) -> list[socket.socket]:
    """Return a socket on the port for each worker; ``ConfigError`` if there is none to be had."""
    with bind_port(config) as only:  # a port that another process has is refused, as without workers
        port = only.getsockname()[1]
    return [bind(config.host, port, reuse_port=True) for _ in range(config.workers)]


def max_connections() -> int:
    """Return the most connections of clients: each may need one to a backend, for which a file must be left.

    A backend to which no connection can be made is taken to be out.
    """
    return within_open_files(MAX_CONNECTIONS, files_beside=FILES_BESIDE_CONNECTIONS, files_each=2)


async def reload_on_change(
    proxy: Proxy, read: Callable[[], ProxyConfig], file: Path, seen: tuple[int, int, int] | None
) -> None:
    """Read the configuration again at SIGHUP and when its file changes; a wrong one is refused, and the old one stays.

    ``seen`` is the file's stamp when the configuration that the router started with was read. A signal has one handler:
    this one reads the tenants again as well.
    """
    asked = asyncio.Event()

    def ask() -> None:
        asked.set()
        if proxy.tenants is not None:
            proxy.tenants.reread(always=True)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, ask)
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REREAD_S):
                await asked.wait()
        now = stamp_of(file)
        if not asked.is_set() and now == seen:
            continue
        asked.clear()
        seen = now
        try:
            await proxy.configure(await asyncio.to_thread(read))
        except ConfigError as error:
            logger.error("reload_refused file=%s reason=%r", file, str(error))


def run(
    config: ProxyConfig,
    *,
    environment: Mapping[str, str] | None = None,
    file: str | None = None,
    read: Callable[[], ProxyConfig] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code, also in each worker; call it from the main thread.

    The ``environment`` has keys of backends. If the options come from a ``file``, ``read`` reads it again.
    ``ManyloraError`` if the router could not start.
    """
    tasks: list[asyncio.Task[None]] = []
    worker: RouteWorker | None = None
    if config.workers > 1:
        started = start_workers(config.workers, lambda: bind_workers(config))
        if isinstance(started, int):
            return started
        worker = started
    seen = None
    if file is not None and read is not None:
        config, seen = _reloaded(config, read, file)

    def make() -> Proxy:
        proxy = Proxy(config, environment=environment, worker=worker)
        if worker is not None:
            _drain_with_parent(proxy, worker, config.drain_timeout_s)
        if file is not None and read is not None:
            tasks.append(asyncio.create_task(reload_on_change(proxy, read, Path(file), seen)))
        return proxy

    def say_ready(proxy: Proxy) -> None:
        backends = proxy.backends
        if worker is None or not worker.is_again:
            by = "" if worker is None else f" by {config.workers} workers"
            print(f"manylora routes to {backends.num_up} of {len(backends)} backends{by} at {proxy.url}", flush=True)
        if worker is not None:
            worker.say_ready()
        if proxy.tenants is not None and not tasks:  # else they are read by ``reload_on_change``
            proxy.tenants.reread_on_signal()

    return run_until_stopped(make, say_ready, drain_timeout_s=config.drain_timeout_s)


def _reloaded(
    config: ProxyConfig, read: Callable[[], ProxyConfig], file: str
) -> tuple[ProxyConfig, tuple[int, int, int] | None]:
    """Return the configuration with its file's backends and names of now, and the stamp of the file before it was read.

    The file may have changed since the start, as for a worker that is started again; a change from now on shows.
    """
    seen = stamp_of(file)
    try:
        now = read()
    except ConfigError as error:
        logger.error("reload_refused file=%s reason=%r", file, str(error))
        return config, seen
    return replace(config, **{name: getattr(now, name) for name in RELOADED}), seen


def _drain_with_parent(proxy: Proxy, worker: RouteWorker, timeout_s: float) -> None:
    """Drain once the parent stops, or has ended without a word."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(worker.parent)
        logger.warning("draining timeout_s=%.1f (again to exit at once)", timeout_s)
        proxy.drain()

    loop.add_reader(worker.parent, ended)
