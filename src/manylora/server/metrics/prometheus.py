"""Prometheus metrics: vLLM's names where routers and dashboards scrape them, ``manylora_*`` beside them.

Durations are histograms fed with the engine's observations; everything else is read from one snapshot of the engine
at the moment of the scrape, so that nothing is counted twice and an adapter that is gone vanishes with its labels.
Counters of the engine start again at zero when it is restarted, as Prometheus expects of a restarted process.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.config import EngineConfig
from manylora.engine.status import AdapterStatus, EngineStats
from manylora.hosting.engine_keeper import State
from manylora.hosting.fleet import Fleet
from manylora.hosting.protocol import Observations
from manylora.server.metrics.by_adapter import FIRST_TOKEN_S, REQUEST_S, TOKEN_S, AdapterMetrics
from manylora.server.metrics.histograms import BatchHistogram
from manylora.types import Tier

__all__ = ["Metrics"]

LEVELS = {Tier.DEVICE: "gpu", Tier.HOST: "cpu"}
"""Tiers by the words routers look for; "gpu" is the device, whatever it is."""

LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Metrics(Collector):
    """All metrics of one server.

    Args:
        config: The engine's configuration, for the values that are labels.
        has_adapter_histograms: Whether latencies are kept by adapter as well.
        served_name: The base model's name: the label ``model_name`` of everything under vLLM's names.
        epoch_s: Tells the time for people, in seconds since the epoch.
    """

    def __init__(
        self, config: EngineConfig, *, has_adapter_histograms: bool, served_name: str, epoch_s: Callable[[], float]
    ) -> None:
        self._config = config
        self._served_name = served_name
        self._epoch_s = epoch_s
        self._fleet: Fleet | None = None
        self._stats: EngineStats | None = None
        self._statuses: Sequence[AdapterStatus] = ()
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> BatchHistogram:
            labels = {"model_name": served_name}
            return BatchHistogram(name, text, labels, registry=self._registry, buckets=buckets)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "Time between tokens.", TOKEN_S)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the end.", REQUEST_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "Time spent waiting.", REQUEST_S)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of ended requests.", TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Generated tokens of ended requests.", TOKENS)
        self._loads = Histogram(
            "vllm:lora_adapter_load_seconds",
            "Time to bring an adapter up to a tier.",
            ["model_name", "level"],
            registry=self._registry,
            buckets=LOAD_S,
        )
        self._finished = Counter(
            "vllm:request_success", "Ended requests.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._failed_loads = Counter(
            "manylora_adapter_load_failures", "Adapter loads that failed.", registry=self._registry
        )
        self._by_adapter = AdapterMetrics(
            self._registry, has_histograms=has_adapter_histograms, max_adapters=config.adapters.max_registered
        )

    def observe(self, observed: Observations) -> None:
        """Take the engine's observations since its last message."""
        durations: tuple[tuple[BatchHistogram, Iterable[float]], ...] = (
            (self._queue, observed.queue_s),
            (self._ttft, chain.from_iterable(observed.ttft_s.values())),
            (self._inter_token, chain.from_iterable(observed.inter_token_s.values())),
        )
        for histogram, values in durations:
            for value, count in Tally(values).items():  # those of one step are mostly equal
                histogram.add(value, count)
        for tier, values in ((Tier.DEVICE, observed.device_loads_s), (Tier.HOST, observed.host_loads_s)):
            loads = self._loads.labels(self._served_name, LEVELS[tier])
            for value in values:
                loads.observe(value)
        for request in observed.finished:
            self._e2e.add(request.e2e_s)
            self._prompt.add(request.num_prompt_tokens)
            self._generated.add(request.num_output_tokens)
            self._finished.labels(self._served_name, request.reason).inc()
        if observed.num_failed_loads:
            self._failed_loads.inc(observed.num_failed_loads)
        self._by_adapter.observe(observed)

    def render(self, fleet: Fleet, stats: EngineStats | None, statuses: Sequence[AdapterStatus]) -> bytes:
        """Return the metrics as Prometheus text.

        Args:
            fleet: The engines.
            stats: Their snapshot; ``None`` where there is no engine just now.
            statuses: Their adapters.
        """
        self._fleet, self._stats, self._statuses = fleet, stats, statuses
        if stats is not None:
            self._by_adapter.keep_only({status.name for status in statuses})
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read at the moment of the scrape; prometheus-client calls this."""
        if self._fleet is None:
            return
        is_up = self._fleet.state is State.SERVING
        yield GaugeMetricFamily("manylora_engine_up", "Whether the engine serves.", value=float(is_up))
        yield CounterMetricFamily(
            "manylora_engine_restarts", "Engines started after the first.", value=self._fleet.num_restarts
        )
        if self._stats is not None:
            yield from self._vllm_metrics(self._stats)
            yield from self._own_metrics(self._stats)
            yield from self._adapter_metrics()

    def _vllm_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._served_name], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._served_name], value)
            return family

        yield gauge("vllm:num_requests_running", "Requests in the running batch.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests waiting.", stats.num_waiting)
        yield gauge(
            "vllm:kv_cache_usage_perc",
            "Share of all pages that running requests hold.",
            stats.num_kv_pages / stats.num_pages,
        )
        yield counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.num_prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens)
        yield counter("vllm:num_preemptions", "Requests that gave their pages back.", stats.num_preemptions)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prompt_tokens)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_cached_tokens)

        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The pool of pages.",
            labels=["block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization"],
        )
        memory = self._config.memory
        config.add_metric(
            [
                str(memory.block_size),
                str(stats.num_pages),
                str(memory.prefix_caching),
                str(memory.gpu_memory_utilization),
            ],
            1.0,
        )
        yield config

        yield gauge("vllm:num_gpu_loaded_lora_adapters", "Adapter versions on the device.", stats.num_resident)
        yield gauge("vllm:num_cpu_loaded_lora_adapters", "Adapter versions in the host tier.", stats.num_host)
        resident = sorted(status.name for status in self._statuses if status.tier is Tier.DEVICE)
        most = self._config.scheduler.max_loras or max(1, stats.num_registered)
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters on the device (running) and with requests waiting; the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lora.add_metric([str(most), ",".join(resident), ",".join(stats.waiting_adapters)], self._epoch_s())
        yield lora
        yield gauge("vllm:max_gpu_lora_adapters", "Most adapters in a step.", most)

    def _own_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        pages = GaugeMetricFamily("manylora_pages", "Pages of the pool by owner.", labels=["owner"])
        for owner, value in (
            ("free", stats.num_free_pages),
            ("kv", stats.num_kv_pages),
            ("prefix", stats.num_prefix_pages),
            ("adapter", stats.num_adapter_pages),
        ):
            pages.add_metric([owner], value)
        yield pages
        tiers = Tally(status.tier.value for status in self._statuses)
        adapters = GaugeMetricFamily("manylora_adapters", "Registered adapters by highest tier.", labels=["tier"])
        for tier in Tier:
            adapters.add_metric([tier.value], tiers[tier.value])
        yield adapters
        for name, text, value in (
            ("manylora_adapters_registered", "Registered adapter names.", stats.num_registered),
            ("manylora_adapters_resident", "Adapter versions on the device.", stats.num_resident),
            ("manylora_adapters_loading", "Adapter versions on their way to the device.", stats.num_loading),
            ("manylora_adapters_active", "Adapter versions that running requests use.", stats.num_active),
            ("manylora_host_adapters", "Adapter versions in the host tier.", stats.num_host),
            ("manylora_host_bytes", "Bytes of the host tier in use.", stats.host_bytes),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        loads = CounterMetricFamily("manylora_adapter_loads", "Adapter loads completed.", labels=["tier"])
        loads.add_metric([Tier.DEVICE.value], stats.num_loads)
        loads.add_metric([Tier.HOST.value], stats.num_disk_loads)
        yield loads
        for name, text, value in (
            ("manylora_adapter_prefetches", "Loads begun before a request's turn.", stats.num_prefetches),
            ("manylora_adapter_evictions", "Adapters dropped from the device for room.", stats.num_evictions),
            ("manylora_prefix_evictions", "Prefix pages dropped for room.", stats.num_prefix_evictions),
            ("manylora_lora_requests", "Requests that asked for an adapter.", stats.num_adapter_requests),
            ("manylora_lora_hits", "Those that found it on the device.", stats.num_adapter_hits),
            ("manylora_steps", "Steps completed.", stats.num_steps),
        ):
            yield CounterMetricFamily(name, text, value=value)

    def _adapter_metrics(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for every adapter in memory, by the highest level it is in.",
            labels=["model_name", "adapter_name", "level", "pinned", "rank"],
        )
        requests = CounterMetricFamily("manylora_adapter_requests", "Requests by adapter.", labels=["adapter_name"])
        hits = CounterMetricFamily(
            "manylora_adapter_hits", "Requests that found their adapter on the device.", labels=["adapter_name"]
        )
        for status in self._statuses:
            if status.tier in LEVELS:
                pinned = str(status.is_pinned).lower()
                rank = str(status.version.rank)
                loaded.add_metric([self._served_name, status.name, LEVELS[status.tier], pinned, rank], 1.0)
            requests.add_metric([status.name], status.num_requests)
            hits.add_metric([status.name], status.num_hits)
        yield loaded
        yield requests
        yield hits
