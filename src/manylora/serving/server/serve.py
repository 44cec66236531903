"""Start and stop of the server: sockets, engines, signals.

::

    bind -> start engine, load tokenizer -> listen (503) -> adapters loaded -> ready (200)
         -> first signal: drain (503 for new requests, others may finish) -> stop engine -> exit 0
         -> second signal: exit at once

``run`` blocks, for the command line; ``background`` runs the same server in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from manylora.core.adapters.folder import real_roots
from manylora.core.adapters.report import check_folders
from manylora.core.adapters.sources import is_url
from manylora.core.config import EngineConfig, ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.machine import count_cores
from manylora.core.routing import Router, RouterContext, make_router
from manylora.core.scaling.autoscaler import ScalingPolicy
from manylora.core.server_config import FleetConfig
from manylora.demo import demo_model_path
from manylora.serving.hosting.engine.service import builder_for
from manylora.serving.hosting.engine.startup import collector_paused, freeze_start_up_heap
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.fleet import Fleet, FleetPolicy
from manylora.serving.hosting.fleet.keeper import RestartPolicy
from manylora.serving.hosting.fleet.resumption import ResumePolicy
from manylora.serving.hosting.links.base_share import BaseShare
from manylora.serving.hosting.links.link import LINKS, EngineLink
from manylora.serving.hosting.protocol import EngineSpec, Observations
from manylora.serving.hosting.ray.cluster import RayCluster, engine_resources
from manylora.serving.hosting.ray.link import RayLink
from manylora.serving.hosting.spool import AdapterSpool
from manylora.serving.http.auth import exposure
from manylora.serving.http.listening import HttpServer, bind, bind_unix, run_until_stopped, url_of
from manylora.serving.http.rereading import keep_reading
from manylora.serving.http.tenants import TenantBook
from manylora.serving.http.traces import Traces, sent_traces
from manylora.serving.metrics.engine_spans import add_spans
from manylora.serving.metrics.prometheus import Metrics
from manylora.serving.metrics.usage import UsageLedger

__all__ = ["Server", "engine_specs", "run"]

logger = logging.getLogger(__name__)


class Server:
    """One server, from start to stop, on one event loop; ``ConfigError`` if it cannot listen on the address."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        modules: Sequence[LoraModule],
        *,
        builder: str | None = None,
        restarts: RestartPolicy | None = None,
    ) -> None:
        if engine.model.model == "demo":
            served = engine.model.served_model_name or "demo"
            engine = replace(
                engine, model=replace(engine.model, model=str(demo_model_path()), served_model_name=served)
            )
        named = {one.name: one.path for one in modules if one.is_required and not is_url(one.path)}
        if builder is None and engine.simulate is None:  # before the model is loaded, which may take minutes
            check_folders(named, max_bytes=engine.adapters.max_adapter_bytes)
        self._named_paths = list(named.values())
        if engine.adapters.real_roots is None:
            roots = real_roots([*server.lora_dirs, *server.allowed_lora_paths], self._named_paths)
            engine = replace(engine, adapters=replace(engine.adapters, real_roots=roots))
        self._spool = AdapterSpool(server.publish.publish_bytes) if server.publish.publish else None
        if self._spool is not None:
            place = self._spool.path
            roots = (*(engine.adapters.real_roots or ()), place)
            engine = replace(engine, adapters=replace(engine.adapters, real_roots=roots, published_root=place))
        self._engine_config = engine
        self._config = server
        self._modules = modules
        served_name = engine.model.served_model_name or engine.model.model
        self._metrics = Metrics(engine, has_adapter_histograms=server.adapter_histograms, served_name=served_name)
        self._usage = None if server.usage is None else UsageLedger(Path(server.usage).expanduser())
        self._traces = sent_traces(server.web.traces, "manylora")
        self._shares: defaultdict[str, BaseShare] = defaultdict(BaseShare)  # by device
        self._cluster = None
        if server.fleet.ray is not None:
            resources = engine_resources(server.fleet.ray_resources, engine.model.device)
            self._cluster = RayCluster(server.fleet, resources)
        specs = engine_specs(engine, server.fleet, served_name=served_name, builder=builder or builder_for(engine))
        self.fleet = Fleet(
            [functools.partial(self._make_link, spec) for spec in specs],
            served_name=served_name,
            observe=_observer(self._metrics, self._usage, self._traces),
            policy=_fleet_policy(engine, server, served_name, restarts or RestartPolicy()),
        )
        if self._spool is not None:
            self.fleet.adapters.versions.on_freed = self._spool.remove
        self.tenants = None if server.tenants is None else TenantBook(Path(server.tenants).expanduser())
        self._socket, self.url = _listen(server)
        self._stop, self._abandoned = asyncio.Event(), asyncio.Event()
        self._drain_timeout_s = server.drain_timeout_s

    def drain(self) -> None:
        """Begin to stop: new requests are refused, requests in flight may finish."""
        self.fleet.drain()
        self._stop.set()

    def abandon(self) -> None:
        """Stop now, drained or not; requests in flight fail."""
        self._abandoned.set()
        self.drain()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until drained, or raise ``ManyloraError``: it could not start, or the engine died too often."""
        listening = asyncio.Event()

        async def live() -> None:
            await self.fleet.start(self._modules)
            await listening.wait()  # a simulated engine is up before the tokenizer is loaded
            on_ready()
            await self.fleet.run()

        living = asyncio.create_task(live())
        stopping = asyncio.create_task(self._stop.wait())
        watching = [] if self.tenants is None else [asyncio.create_task(keep_reading(self.tenants.reread))]
        if self._usage is not None:
            watching.append(asyncio.create_task(self._usage.run()))
        http: HttpServer | None = None
        tasks: list[asyncio.Task[None]] = [living]
        try:
            await asyncio.sleep(0)  # the engines start first: the imports of the text side take as long as theirs
            http = await asyncio.to_thread(self._make_http_server, listening.set)
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
            for share in self._shares.values():
                share.close()
            if self._spool is not None:
                self._spool.close()
            if self._cluster is not None:
                await self._cluster.close()
            stopping.cancel()
            living.cancel()
            for task in watching:
                task.cancel()
            if http is None:
                self._socket.close()
            else:
                http.should_exit = True
            await asyncio.gather(stopping, *tasks, *watching, return_exceptions=True)
            if self._usage is not None:
                await self._usage.close()
            if self._traces is not None:
                await self._traces.close()

    def _make_http_server(self, on_listening: Callable[[], None]) -> HttpServer:
        """Import and load the text side, which takes seconds; on a thread."""
        with collector_paused():
            from manylora.serving.server.http_server import make_http_server

        return make_http_server(
            self._engine_config,
            self._config,
            fleet=self.fleet,
            metrics=self._metrics,
            named_paths=self._named_paths,
            spool=self._spool,
            on_listening=on_listening,
            tenants=self.tenants,
            traces=self._traces,
        )

    def _make_link(self, spec: EngineSpec) -> EngineLink:
        if self._cluster is not None:
            return RayLink(spec, self._cluster)
        make = LINKS["thread" if self._config.in_process else "process"]
        return make(spec, self._shares[spec.config.model.device])

    async def _finish_in_flight(self) -> None:
        ends = [asyncio.create_task(one) for one in (self.fleet.requests.in_progress.ended(), self._abandoned.wait())]
        done, _ = await asyncio.wait(ends, timeout=self._drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for one in ends:
            one.cancel()
        if not done and self._drain_timeout_s:
            logger.warning("drain_timed_out after_s=%.1f", self._drain_timeout_s)


def engine_specs(engine: EngineConfig, fleet: FleetConfig, *, served_name: str, builder: str) -> list[EngineSpec]:
    """Return the engines of a fleet.

    Engines on one device share it, even those that scaling has not started: each takes its part of
    ``gpu_memory_utilization``, of the CPU's cores, and of the host memory for adapters. On a Ray cluster each has the
    resources that it asks for, and shares the host memory and the cores of its node with as many as the node has room
    for. The step log of engine 1 has ``.1`` before its suffix.
    """
    num, part = fleet.num_places, engine.memory.gpu_memory_utilization
    if fleet.ray is not None and engine.model.tensor_parallel_size > 1:
        size = engine.model.tensor_parallel_size
        raise ConfigError(f"Got tensor_parallel_size = {size}, ray = {fleet.ray!r}, expected one of them")
    if fleet.ray is None and num == 1 and fleet.devices is None:
        return [EngineSpec(config=engine, served_name=served_name, builder=builder)]
    named = [engine.model.device] if fleet.devices is None else fleet.devices.split(",")
    devices = [named[index % len(named)] for index in range(num)]
    on_device = Counter(devices)
    num_threads = None if num == 1 else max(1, count_cores() // num)
    if fleet.ray is not None:  # which gives each engine a node, a device and cores
        resources = engine_resources(fleet.ray_resources, engine.model.device)
        part *= min(1.0, resources.get("GPU", 1.0))
        num_threads = max(1, int(resources.get("CPU", 1)))
    if fleet.ray is not None or engine.simulate is not None:  # of simulated devices there are as many as engines
        on_device = Counter(set(devices))
    configs = [
        replace(
            engine,
            model=replace(engine.model, device=device),
            memory=replace(engine.memory, gpu_memory_utilization=part / on_device[device]),
            num_engines=num,  # on a node of Ray's, which is not known yet, at most
            num_on_device=on_device[device],
            step_log=None if engine.step_log is None else _numbered(engine.step_log, index),
        )
        for index, device in enumerate(devices)
    ]
    return [
        EngineSpec(config=one, served_name=served_name, builder=builder, num_threads=num_threads) for one in configs
    ]


def _numbered(path: str, index: int) -> str:
    file = Path(path)
    return path if index == 0 else str(file.with_name(f"{file.stem}.{index}{file.suffix}"))


def _observer(metrics: Metrics, usage: UsageLedger | None, traces: Traces | None) -> Callable[[Observations], None]:
    """Return what takes the observations of engines."""
    observers = [one.observe for one in (metrics, usage) if one is not None]
    if traces is not None:
        observers.append(functools.partial(add_spans, traces))

    def observe(observed: Observations) -> None:
        for one in observers:
            one(observed)

    return observers[0] if len(observers) == 1 else observe


def _listen(server: ServerConfig) -> tuple[socket.socket, str]:
    """Return the server's socket and its URL."""
    web = server.web
    if web.uds is not None:
        return bind_unix(web.uds, int(web.uds_mode, 8)), f"unix:{web.uds}"
    bound = bind(server.host, server.port)
    return bound, url_of(bound, is_tls=web.tls.ssl_certfile is not None)


def _fleet_policy(engine: EngineConfig, server: ServerConfig, served_name: str, restarts: RestartPolicy) -> FleetPolicy:
    # A thread cannot be killed, and a debugger's breakpoint is not a hang.
    timeouts = (None, None) if server.in_process else (server.hang_timeout_s or None, server.start_timeout_s or None)
    fleet, max_num_seqs = server.fleet, engine.scheduler.max_num_seqs

    def make_own_router(ranks: Mapping[str, int]) -> Router:
        rng = Random(engine.seed)
        context = RouterContext(rng=rng, base_name=served_name, max_num_seqs=max_num_seqs, ranks=ranks)
        return make_router(fleet.router, context, fleet.router_options)

    return FleetPolicy(
        restarts=replace(restarts, hang_timeout_s=timeouts[0], start_timeout_s=timeouts[1]),
        resumes=ResumePolicy(max_resumes=fleet.max_resumes, max_wait_s=fleet.resume_timeout_s, seed=engine.seed),
        make_router=make_own_router,
        scaling=None
        if fleet.max_replicas is None
        else ScalingPolicy(
            min_replicas=fleet.min_replicas or 1,
            max_replicas=fleet.max_replicas,
            ttft_s=fleet.slo_ttft_s,
            capacity_rps=fleet.replica_rate,
            max_num_seqs=max_num_seqs,
        ),
        num_devices=1 if fleet.devices is None else len(fleet.devices.split(",")),
        drain_timeout_s=server.drain_timeout_s,
        caches_prefixes=engine.memory.prefix_caching,
    )


def run(
    engine: EngineConfig, server: ServerConfig, lora_modules: Sequence[LoraModule] = (), *, builder: str | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, and return 0; call it from the main thread.

    ``ManyloraError`` if the server could not start, or the engine died too often.
    """

    def say_ready(one: Server) -> None:
        adapters = len(one.fleet.adapters.loaded)
        freeze_start_up_heap()
        print(f"manylora serves {one.fleet.served_name} with {adapters} adapters at {one.url}", flush=True)
        is_keyed = (one.tenants or server.router_key) and not server.api_keys  # these do not open the adapter routes
        if not is_keyed and (note := exposure(server.api_keys, server.admin_key, has_address=server.web.uds is None)):
            logger.warning("adapter_routes_are_open note=%r", note)
        if one.tenants is not None:
            one.tenants.reread_on_signal()

    make = functools.partial(Server, engine, server, lora_modules, builder=builder)
    return run_until_stopped(make, say_ready, drain_timeout_s=server.drain_timeout_s)
