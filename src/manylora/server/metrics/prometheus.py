"""Prometheus metrics: vLLM's names where routers and dashboards scrape them, ``manylora_*`` beside them.

Durations are histograms, fed with the engines' observations. All other metrics are read from one snapshot at the
moment of the scrape (``scrape.py``). Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as CountOf
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.config import EngineConfig
from manylora.functions.wire import FunctionState
from manylora.hosting.protocol import Observations
from manylora.hosting.snapshot import Snapshot
from manylora.server.metrics.function_metrics import function_metrics
from manylora.server.metrics.latency import LatencyWindow
from manylora.server.metrics.scrape import LEVELS, by_replica, fleet_metrics, snapshot_metrics
from manylora.server.served import ServedFleet
from manylora.types import Tier

__all__ = ["BatchHistogram", "Metrics"]

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


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
        self._fleet: ServedFleet | None = None
        self._snapshots: Mapping[int, Snapshot] = {}
        self._functions: Sequence[FunctionState] = ()
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
        self._by_adapter = _AdapterMetrics(
            self._registry, has_histograms=has_adapter_histograms, max_adapters=config.adapters.max_registered
        )

    def observe(self, observed: Observations) -> None:
        """Add an engine's observations since its last message."""
        durations: tuple[tuple[BatchHistogram, Iterable[float]], ...] = (
            (self._queue, observed.queue_s),
            (self._ttft, chain.from_iterable(observed.ttft_s.values())),
            (self._inter_token, chain.from_iterable(observed.inter_token_s.values())),
        )
        for histogram, values in durations:
            for value, count in CountOf(values).items():  # gaps within one step are mostly equal
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
        self.latency.observe(observed, self._monotonic_s())

    def render(
        self, fleet: ServedFleet, snapshots: Mapping[int, Snapshot], functions: Sequence[FunctionState] = ()
    ) -> bytes:
        """Return the metrics as Prometheus text.

        Args:
            fleet: The engines.
            snapshots: Those of engines that serve, by number, with their adapters that are in use: unused ones have no
                series of their own.
            functions: Isolated functions that have been awake.
        """
        self._fleet, self._snapshots, self._functions = fleet, snapshots, functions
        if snapshots:
            self._by_adapter.keep_only(fleet.adapters.loaded)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read at the moment of the scrape; prometheus-client calls this."""
        if self._fleet is None:
            return
        yield from fleet_metrics(self._fleet)
        if self._functions:
            yield from function_metrics(self._functions)
        families = {
            index: snapshot_metrics(stats, statuses, self._config, served_name=self._served_name, now_s=self._epoch_s())
            for index, (stats, statuses) in self._snapshots.items()
        }
        if self._fleet.num_replicas > 1:
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


class BatchHistogram(Collector):
    """A Prometheus histogram with fixed labels that adds many equal values at once.

    Every token has its gap to the one before, and gaps of one step are often equal: counting equal values together
    costs a tenth of one ``Histogram.observe`` for each.

    Args:
        name: Of the metric.
        text: Its description.
        labels: Its labels, by name.
        registry: Shows it.
        buckets: Upper edges, ascending, without infinity.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._edges = tuple(buckets)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0
        registry.register(self)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value ``count`` times."""
        self._counts[bisect_left(self._edges, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram; prometheus-client calls this."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        edges = [*map(str, map(float, self._edges)), "+Inf"]
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        yield family
