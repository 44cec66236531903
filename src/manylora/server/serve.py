"""Start and stop of the server: sockets, engines, signals.

::

    bind -> load tokenizer, start engine -> listen (503) -> adapters loaded -> ready (200)
         -> first signal: drain (503 for new requests, others may finish) -> stop engine -> exit 0
         -> second signal: exit at once

``run`` blocks, for the command line; ``background`` runs the same server in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from random import Random

import uvicorn

from manylora.config import EngineConfig, FleetConfig, ServerConfig
from manylora.demo import demo_model_path
from manylora.generation import GenerationDefaults
from manylora.hosting.adapter_book import LoraModule
from manylora.hosting.base_share import BaseShare
from manylora.hosting.engine_keeper import RestartPolicy
from manylora.hosting.engine_specs import engine_specs
from manylora.hosting.fleet import Fleet
from manylora.hosting.gc_freeze import freeze_start_up_heap
from manylora.hosting.link import LINKS, EngineLink
from manylora.hosting.protocol import EngineSpec
from manylora.hosting.ray.cluster import RayCluster
from manylora.hosting.ray.link import RayLink
from manylora.hosting.ray.resources import engine_resources
from manylora.hosting.resumption import ResumePolicy
from manylora.hosting.service import builder_for
from manylora.routing import Router, RouterContext, make_router
from manylora.scaling import ScalingPolicy
from manylora.server.api.request import Context
from manylora.server.app import make_app
from manylora.server.auth import Gate
from manylora.server.http_protocol import ChunkWritingProtocol, ConnectionBounds
from manylora.server.listening import HttpServer, bind, run_until_stopped, url_of
from manylora.server.metrics.prometheus import Metrics
from manylora.server.model_settings import ModelSettings
from manylora.text import Tokenizer
from manylora.text.generation_file import load_generation_defaults

__all__ = ["Server", "run"]

LAST_WRITES_S = 2.0
"""Time that clients have to read the last bytes of failed answers, in seconds."""

FILES_BESIDE_CONNECTIONS = 64
"""Files that the server opens at once, beside connections and engines."""

FILES_PER_ENGINE = 32
"""Files that an engine takes here: its sockets, its pipe, and those of the next while it is replaced."""

logger = logging.getLogger(__name__)


class Server:
    """One server, from start to stop, on one event loop.

    Args:
        engine: Configuration of the engine.
        server: Configuration of the HTTP server.
        modules: Adapters to load at start.
        builder: Builds the engine's parts, as ``module:function``.
        restarts: When to restart a dead engine.

    Raises:
        ConfigError: The server cannot listen on the address.
    """

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        modules: Sequence[LoraModule],
        *,
        builder: str,
        restarts: RestartPolicy,
    ) -> None:
        if engine.model.model == "demo":
            named = engine.model.served_model_name or "demo"
            engine = replace(engine, model=replace(engine.model, model=str(demo_model_path()), served_model_name=named))
        self._engine_config = engine
        self._config = server
        self._modules = modules
        served_name = engine.model.served_model_name or engine.model.model
        self._metrics = Metrics(
            engine,
            has_adapter_histograms=server.adapter_histograms,
            served_name=served_name,
            epoch_s=time.time,
            monotonic_s=time.monotonic,
        )
        self._share = BaseShare()
        self._cluster = None if server.fleet.ray is None else _ray_cluster(engine, server.fleet)
        specs = engine_specs(engine, server.fleet, served_name=served_name, builder=builder)
        self.fleet = Fleet(
            [functools.partial(self._make_link, spec) for spec in specs],
            served_name=served_name,
            make_router=functools.partial(_make_router, engine, server.fleet, served_name),
            restarts=restarts,
            resumes=ResumePolicy(max_resumes=server.fleet.max_resumes, patience_s=server.drain_timeout_s),
            seed=engine.seed,
            observe=self._metrics.observe,
            scaling=_scaling_policy(engine, server.fleet),
            drain_timeout_s=server.drain_timeout_s,
            # A thread cannot be killed, and a debugger's breakpoint is not a hang.
            hang_timeout_s=None if server.in_process else server.hang_timeout_s or None,
            start_timeout_s=None if server.in_process else server.start_timeout_s or None,
        )
        self._socket = bind(server.host, server.port)
        self.url = url_of(self._socket)
        self._stop = asyncio.Event()
        self._drain_timeout_s = server.drain_timeout_s

    @property
    def is_stopping(self) -> bool:
        """Whether the server was asked to stop."""
        return self._stop.is_set()

    def drain(self) -> None:
        """Begin to stop: new requests are refused, requests in flight may finish."""
        self.fleet.drain()
        self._stop.set()

    def abandon(self) -> None:
        """Stop now; requests in flight fail."""
        self._drain_timeout_s = 0.0
        self.drain()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until drained.

        Raises:
            ManyloraError: The server could not start, or the engine died too often.
        """
        listening = asyncio.Event()

        async def live() -> None:
            await self.fleet.start(self._modules)
            await listening.wait()  # a simulated engine is up before the tokenizer is loaded
            on_ready()
            await self.fleet.run()

        living = asyncio.create_task(live())
        stopping = asyncio.create_task(self._stop.wait())
        http: HttpServer | None = None
        tasks: list[asyncio.Task[None]] = [living]
        try:
            model = self._engine_config.model
            load = functools.partial(Tokenizer.load, model.tokenizer or model.model, revision=model.revision)
            tokenizer = await asyncio.to_thread(load)
            # A simulated engine reads only the tokenizer of its model, which may be all there is.
            is_live = self._engine_config.simulate is None
            named = model if is_live else replace(model, model=model.tokenizer or model.model)
            defaults = await asyncio.to_thread(load_generation_defaults, named)
            http = self._http_server(tokenizer, defaults, listening.set)
            tasks.append(asyncio.create_task(http.serve(sockets=[self._socket])))
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await self._finish_in_flight()
            else:
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            await self.fleet.stop()  # clients that wait get an error
            self._share.close()
            if self._cluster is not None:
                await self._cluster.close()
            stopping.cancel()
            living.cancel()
            if http is None:
                self._socket.close()
            else:
                http.should_exit = True
            await asyncio.gather(stopping, *tasks, return_exceptions=True)

    def _make_link(self, spec: EngineSpec) -> EngineLink:
        if self._cluster is not None:
            return RayLink(spec, self._cluster)
        return LINKS["thread" if self._config.in_process else "process"](spec, self._share)

    async def _finish_in_flight(self) -> None:
        try:
            await asyncio.wait_for(self.fleet.idle(), self._drain_timeout_s)
        except TimeoutError:
            if self._drain_timeout_s:
                logger.warning("drain_timed_out after_s=%.1f", self._drain_timeout_s)

    def _http_server(
        self, tokenizer: Tokenizer, defaults: GenerationDefaults | None, on_listening: Callable[[], None]
    ) -> HttpServer:
        version = metadata.version("manylora")
        model = self._engine_config.model
        digest = hashlib.blake2b(f"{version}/{model.model}/{model.revision}/{model.dtype}".encode(), digest_size=5)
        # An adapter named at start may be loaded again from its directory; those found are below a folder of adapters.
        named = (module.path for module in self._modules if module.is_required)
        roots = [*self._config.lora_dirs, *self._config.allowed_lora_paths, *named]
        context = Context(
            engine_config=self._engine_config,
            config=self._config,
            fleet=self.fleet,
            tokenizer=tokenizer,
            gate=Gate(self._config.api_keys, self._config.admin_key),
            settings=ModelSettings(
                defaults,
                base_name=self.fleet.served_name,
                adapters=self.fleet.adapters.loaded,
                tokenizer=tokenizer,
                trusts_templates=self._config.trust_adapter_templates,
            ),
            metrics=self._metrics,
            lora_roots=tuple(dict.fromkeys(Path(root) for root in roots)),
            fingerprint=f"fp_{digest.hexdigest()}",
            started_at=int(time.time()),
            epoch_s=time.time,
            monotonic_s=time.monotonic,
        )
        return HttpServer(
            uvicorn.Config(
                make_app(context),
                http=functools.partial(ChunkWritingProtocol, bounds=_connection_bounds(self._config)),  # type: ignore[arg-type]
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                lifespan="off",
                proxy_headers=False,  # a forwarded request is not local; see auth
                server_header=False,
                timeout_keep_alive=self._config.keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=max(1, int(LAST_WRITES_S)),
            ),
            on_listening,
        )


def _connection_bounds(config: ServerConfig) -> ConnectionBounds:
    """Return the bounds of connections, fewer than the files that this process may open."""
    num_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files < most:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse their own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            num_files = most
    room = max(1, num_files - FILES_BESIDE_CONNECTIONS - FILES_PER_ENGINE * config.fleet.num_places)
    if num_files == resource.RLIM_INFINITY:
        room = config.max_connections
    if room < config.max_connections:
        logger.warning("fewer_connections max_connections=%d open_files=%d", room, num_files)
    return ConnectionBounds(
        max_connections=min(room, config.max_connections),
        max_per_address=config.max_connections_per_address,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
    )


def _ray_cluster(engine: EngineConfig, fleet: FleetConfig) -> RayCluster:
    return RayCluster(fleet, engine_resources(fleet.ray_resources, engine.model.device))


def _make_router(engine: EngineConfig, fleet: FleetConfig, served_name: str, ranks: Mapping[str, int]) -> Router:
    context = RouterContext(
        rng=Random(engine.seed), base_name=served_name, max_num_seqs=engine.scheduler.max_num_seqs, ranks=ranks
    )
    return make_router(fleet.router, context, fleet.router_options)


def _scaling_policy(engine: EngineConfig, fleet: FleetConfig) -> ScalingPolicy | None:
    if fleet.max_replicas is None:
        return None
    return ScalingPolicy(
        min_replicas=fleet.min_replicas or 1,
        max_replicas=fleet.max_replicas,
        ttft_s=fleet.slo_ttft_s,
        capacity_rps=fleet.replica_rate,
        max_num_seqs=engine.scheduler.max_num_seqs,
    )


def run(
    engine: EngineConfig,
    server: ServerConfig,
    lora_modules: Sequence[LoraModule] = (),
    *,
    builder: str | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; call it from the main thread.

    Args:
        engine: Configuration of the engine.
        server: Configuration of the HTTP server.
        lora_modules: Adapters to load at start.
        builder: Builds the engine's parts, as ``module:function``; ``None`` for the builder of the configuration.

    Returns:
        The exit code: 0 after a graceful stop.

    Raises:
        ManyloraError: The server could not start, or the engine died too often.
    """

    def make() -> Server:
        return Server(engine, server, lora_modules, builder=builder or builder_for(engine), restarts=RestartPolicy())

    def say_ready(one: Server) -> None:
        adapters = len(one.fleet.adapters.loaded)
        freeze_start_up_heap()
        print(f"manylora serves {one.fleet.served_name} with {adapters} adapters at {one.url}", flush=True)

    return run_until_stopped(make, say_ready, drain_timeout_s=server.drain_timeout_s)
