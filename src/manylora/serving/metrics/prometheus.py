"""Prometheus metrics: vLLM's names where routers and dashboards scrape them, ``manylora_*`` beside them.

Histograms are fed with the engines' observations (``requests.py``). All other metrics are read from one snapshot at the
moment of the scrape (``scrape.py``). The event loop's thread feeds them; a scrape is rendered on another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from manylora.core.config import EngineConfig
from manylora.core.types import Tier
from manylora.serving.hosting.fleet.snapshot import Snapshot
from manylora.serving.hosting.protocol import Observations
from manylora.serving.metrics.functions import FunctionState, function_metrics
from manylora.serving.metrics.latency import LatencyWindow
from manylora.serving.metrics.requests import FIRST_TOKEN_S, LOAD_S, REQUEST_S, TOKEN_S, RequestMetrics
from manylora.serving.metrics.scrape import LEVELS, by_replica, fleet_metrics, snapshot_metrics
from manylora.serving.ports import ServedFleet

__all__ = ["Metrics"]


class Metrics(Collector):
    """All metrics of one server.

    Args:
        config: The engine's configuration, for the values that are labels.
        has_adapter_histograms: Whether latencies are kept by adapter as well.
        served_name: The base model's name: the label ``model_name`` of everything under vLLM's names.
        epoch_s: Returns the time in seconds since the epoch.
        monotonic_s: Returns a time in seconds that never steps back, for the latency window.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        has_adapter_histograms: bool,
        served_name: str,
        epoch_s: Callable[[], float],
        monotonic_s: Callable[[], float],
    ) -> None:
        self.latency = LatencyWindow()
        self._config = config
        self._served_name = served_name
        self._epoch_s = epoch_s
        self._monotonic_s = monotonic_s
        self._rendering = asyncio.Lock()  # what follows is the snapshot of one scrape
        self._of_fleet: Sequence[Metric] = ()
        self._has_replicas = False
        self._snapshots: Mapping[int, Snapshot] = {}
        self._functions: Sequence[FunctionState] = ()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._requests = RequestMetrics(served_name, self._registry)
        self._loads = Histogram(
            "vllm:lora_adapter_load_seconds",
            "Time to bring an adapter up to a tier.",
            ["model_name", "level"],
            registry=self._registry,
            buckets=LOAD_S,
        )
        self._responses = Counter(
            "http_requests", "HTTP responses.", ["method", "status", "handler"], registry=self._registry
        )
        self._failed_loads = Counter(
            "manylora_adapter_load_failures", "Adapter loads that failed.", registry=self._registry
        )
        self._by_adapter = _AdapterMetrics(
            self._registry, has_histograms=has_adapter_histograms, max_adapters=config.adapters.max_registered
        )

    def observe(self, observed: Observations) -> None:
        """Add an engine's observations since its last message."""
        self._requests.observe(observed)
        for tier, values in ((Tier.DEVICE, observed.device_loads_s), (Tier.HOST, observed.host_loads_s)):
            loads = self._loads.labels(self._served_name, LEVELS[tier])
            for value in values:
                loads.observe(value)
        if observed.num_failed_loads:
            self._failed_loads.inc(observed.num_failed_loads)
        self._by_adapter.observe(observed)
        self.latency.observe(observed, self._monotonic_s())

    def count_answers(self, num_tokens: Sequence[int]) -> None:
        """Add the answers of one request, by their numbers of tokens: vLLM keeps their number and the longest."""
        self._requests.count_answers(num_tokens)

    def count_response(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response.

        Args:
            method: Of the request.
            route: Its path, with names in place of values, so that their number is bounded.
            status: HTTP status.
        """
        self._responses.labels(method, f"{status // 100}xx", route).inc()

    async def render(
        self, fleet: ServedFleet, snapshots: Mapping[int, Snapshot], functions: Sequence[FunctionState] = ()
    ) -> bytes:
        """Return the metrics as Prometheus text, made on a thread: ten thousand adapters take a second.

        Args:
            fleet: The engines.
            snapshots: Those of engines that serve, by number, with their adapters that are in use: unused ones have no
                series of their own.
            functions: Isolated functions that have been awake.
        """
        async with self._rendering:
            self._of_fleet, self._snapshots, self._functions = tuple(fleet_metrics(fleet)), snapshots, functions
            if snapshots:
                self._by_adapter.keep_only(fleet.adapters.loaded)
            self._has_replicas = fleet.num_replicas > 1
            return await asyncio.to_thread(generate_latest, self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read at the moment of the scrape; prometheus-client calls this."""
        yield from self._of_fleet
        if self._functions:
            yield from function_metrics(self._functions)
        families = {
            index: snapshot_metrics(stats, statuses, self._config, served_name=self._served_name, now_s=self._epoch_s())
            for index, (stats, statuses) in self._snapshots.items()
        }
        if self._has_replicas:
            yield from by_replica(families)
        else:
            yield from chain.from_iterable(families.values())


class _AdapterMetrics:
    """Metrics with a label for the adapter, added as requests end, and dropped with the adapter.

    Tokens per adapter are always kept: two series each, enough to share costs by. Latency histograms are three times
    some twenty series each, too many for a scrape of a thousand adapters, and so an option
    (``ServerConfig.adapter_histograms``). Without it, ``GET /status`` has the last minute's percentiles.

    Args:
        registry: Shows the metrics.
        has_histograms: Whether latencies are kept as well.
        max_adapters: Most names at once; the oldest name makes room. ``keep_only`` runs at scrapes alone, and a server
            may never be scraped.
    """

    def __init__(self, registry: CollectorRegistry, *, has_histograms: bool, max_adapters: int) -> None:
        self._names: dict[str, None] = {}
        self._max_adapters = max_adapters

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["adapter_name"], registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram | None:
            if not has_histograms:
                return None
            return Histogram(name, text, ["adapter_name"], registry=registry, buckets=buckets)

        self._prompt = counter("manylora_adapter_prompt_tokens", "Prompt tokens of ended requests, by adapter.")
        self._generated = counter("manylora_adapter_generation_tokens", "Tokens generated for ended requests.")
        self._ttft = histogram("manylora_adapter_time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self._inter_token = histogram("manylora_adapter_inter_token_latency_seconds", "Time between tokens.", TOKEN_S)
        self._e2e = histogram("manylora_adapter_e2e_request_latency_seconds", "Arrival to the end.", REQUEST_S)

    def observe(self, observed: Observations) -> None:
        """Add an engine's observations since its last message."""
        for request in observed.finished:
            if request.adapter:
                self._admit(request.adapter)
                self._prompt.labels(request.adapter).inc(request.num_prompt_tokens)
                self._generated.labels(request.adapter).inc(request.num_output_tokens)
                if self._e2e is not None:
                    self._e2e.labels(request.adapter).observe(request.e2e_s)
        for histogram, by_adapter in ((self._ttft, observed.ttft_s), (self._inter_token, observed.inter_token_s)):
            if histogram is None:
                continue
            for name, values in by_adapter.items():
                if name:
                    self._admit(name)
                    child = histogram.labels(name)
                    for value in values:
                        child.observe(value)

    def keep_only(self, names: Collection[str]) -> None:
        """Drop every other adapter."""
        for name in [name for name in self._names if name not in names]:
            self._forget(name)

    def _admit(self, name: str) -> None:
        if name not in self._names:
            if len(self._names) >= self._max_adapters:
                self._forget(next(iter(self._names)))
            self._names[name] = None

    def _forget(self, name: str) -> None:
        del self._names[name]
        for family in (self._prompt, self._generated, self._ttft, self._inter_token, self._e2e):
            if family is not None:
                family.remove(name)
