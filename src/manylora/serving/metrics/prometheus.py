"""Prometheus metrics: vLLM's names where routers and dashboards scrape them, ``manylora_*`` beside them.

Histograms and counters of requests are fed with the engines' observations. All other metrics are read from one snapshot
at the moment of the scrape (``scrape.py``). The event loop's thread feeds them; a scrape is rendered on another.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter as CountOf
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client import generate_latest as as_text
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from manylora.core.config import EngineConfig
from manylora.core.errors import CallerLimit, ManyloraError
from manylora.core.types import Tier
from manylora.serving.hosting.fleet.snapshot import Snapshot
from manylora.serving.hosting.protocol import FinishedRequest, Observations
from manylora.serving.metrics.latency import LatencyWindow, TimedMove
from manylora.serving.metrics.merged import Scraped
from manylora.serving.metrics.scrape import (
    LEVELS,
    FunctionCounts,
    SharedScrape,
    by_replica,
    fleet_metrics,
    function_metrics,
    snapshot_metrics,
)
from manylora.serving.metrics.status_report import FunctionState
from manylora.serving.ports import FleetPort

__all__ = ["BatchHistogram", "Metrics", "choose_format"]

FORMATS: Mapping[str, Callable[[Collector], bytes]] = {
    CONTENT_TYPE_LATEST: as_text,
    # Names as they are: the default writes samples of ``vllm:`` as ``vllm_``, below a family of the other name.
    openmetrics.CONTENT_TYPE_LATEST: partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8),
}
"""Writers of the formats, by their content type."""

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))

HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time to first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Time between tokens.", TOKEN_S),
    "time_per_output_token_seconds": ("Time between tokens.", TOKEN_S),
    "e2e_request_latency_seconds": ("Time from arrival to the end.", REQUEST_S),
    "request_queue_time_seconds": ("Time spent waiting.", REQUEST_S),
    "request_inference_time_seconds": ("Time from admission to the end.", REQUEST_S),
    "request_prefill_time_seconds": ("Time from admission to first token.", REQUEST_S),
    "request_decode_time_seconds": ("Time from first token to the end.", REQUEST_S),
    "request_time_per_output_token_seconds": ("Mean time between a request's tokens.", TOKEN_S),
    "request_prompt_tokens": ("Prompt tokens of ended requests.", TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens that the prefix cache did not hold.", TOKENS),
    "request_generation_tokens": ("Generated tokens of ended requests.", TOKENS),
    "request_params_max_tokens": ("Limits of tokens of ended requests.", TOKENS),
    "request_num_preemptions": ("Pre-emptions of a request.", (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)),
    "request_params_n": ("Answers of a request.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "request_max_num_generation_tokens": ("Tokens of the longest of a request's answers.", TOKENS),
    "iteration_tokens_total": ("Prompt tokens that a step computed, and tokens that it yielded.", TOKENS),
}
"""Histograms under vLLM's names: their descriptions, and the upper edges of their buckets.

Older dashboards ask for names that vLLM has renamed since; those with the same meaning are shown under both names.
"""


MAX_MOVES = 8192  # moves of adapters that are kept, of all of them


class BatchHistogram(Collector):
    """A Prometheus histogram with fixed labels that adds many equal values at once.

    Every token has its gap to the one before, and gaps of one step are often equal: counting equal values together
    costs a tenth of one ``Histogram.observe`` for each.

    ``buckets`` are upper edges, ascending, without infinity.
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


def choose_format(accept: str) -> str:
    """Return the content type of the answer to a scraper: OpenMetrics if it takes that, as Prometheus does."""
    return openmetrics.CONTENT_TYPE_LATEST if "application/openmetrics-text" in accept else CONTENT_TYPE_LATEST


class Metrics:
    """All metrics of one server.

    ``served_name`` is the label ``model_name`` of everything under vLLM's names. ``scrapes`` are shared by scrapers of
    one format.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        has_adapter_histograms: bool,
        served_name: str,
        epoch_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latency = LatencyWindow()
        self.moves: deque[TimedMove] = deque(maxlen=MAX_MOVES)  # the last ones between tiers, for the live page
        self.scrapes = {kind: SharedScrape() for kind in FORMATS}
        self._function_counts = FunctionCounts()
        self._config = config
        self._served_name = served_name
        self._epoch_s = epoch_s
        self._monotonic_s = monotonic_s
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        labels = {"model_name": served_name}
        self._histograms = {
            name: BatchHistogram(f"vllm:{name}", text, labels, registry=registry, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._finished = counter("vllm:request_success", "Ended requests.", "model_name", "finished_reason")
        self._responses = counter("http_requests", "HTTP responses.", "method", "status", "handler")
        rejections = counter("vllm:admission_rejections", "Requests for answers that got 429.", "model_name", "reason")
        self._full, self._beyond_limit = (
            rejections.labels(served_name, reason) for reason in ("max_num_queued_reqs", "caller_limit")
        )
        self._failed_loads = counter("manylora_adapter_load_failures", "Adapter loads that failed.")
        loads = Histogram(
            "vllm:lora_adapter_load_seconds",
            "Time to bring an adapter up to a tier.",
            ["model_name", "level"],
            registry=registry,
            buckets=LOAD_S,
        )
        self._device_loads, self._host_loads = (
            loads.labels(served_name, LEVELS[tier]) for tier in (Tier.DEVICE, Tier.HOST)
        )
        self._by_adapter = _AdapterMetrics(
            registry, has_histograms=has_adapter_histograms, max_adapters=config.adapters.max_registered
        )

    def observe(self, observed: Observations) -> None:
        """Add an engine's observations since its last message."""
        gaps_s = CountOf(chain.from_iterable(observed.inter_token_s.values()))  # those of one step are mostly equal
        self._add("time_to_first_token_seconds", CountOf(chain.from_iterable(observed.ttft_s.values())))
        self._add("inter_token_latency_seconds", gaps_s)
        self._add("time_per_output_token_seconds", gaps_s)
        self._add("request_queue_time_seconds", CountOf(observed.queue_s))
        self._add("iteration_tokens_total", CountOf(observed.step_tokens))
        for request in observed.finished:
            self._finish(request)
        for histogram, values in (
            (self._device_loads, observed.device_loads_s),
            (self._host_loads, observed.host_loads_s),
        ):
            for value in values:
                histogram.observe(value)
        if observed.num_failed_loads:
            self._failed_loads.inc(observed.num_failed_loads)
        self._by_adapter.observe(observed)
        self.latency.observe(observed, self._monotonic_s())
        if observed.moves:
            at = self._epoch_s()
            self.moves.extend(TimedMove(at, move) for move in observed.moves)

    def count_answers(self, num_tokens: Sequence[int]) -> None:
        """Add the answers of one request of a client, by their numbers of tokens: vLLM keeps number and maximum."""
        self._histograms["request_params_n"].add(len(num_tokens))
        self._histograms["request_max_num_generation_tokens"].add(max(num_tokens))

    def count_response(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response.

        ``route`` is its path with names in place of values, so that their number is bounded.
        """
        self._responses.labels(method, f"{status // 100}xx", route).inc()

    def count_refusal(self, error: ManyloraError) -> None:
        """Count a request for answers that gets a 429: the server is full, or its caller has as much as it may."""
        (self._beyond_limit if isinstance(error, CallerLimit) else self._full).inc()

    async def render(
        self,
        fleet: FleetPort,
        snapshots: Mapping[int, Snapshot],
        functions: Sequence[FunctionState] = (),
        *,
        kind: str = CONTENT_TYPE_LATEST,
    ) -> bytes:
        """Return the metrics in the format of a content type, made on a thread: ten thousand adapters take a second.

        ``snapshots`` are those of engines that serve, by number, with their adapters that are in use: unused ones have
        no series of their own. ``functions`` are isolated functions that have been awake.
        """
        if snapshots:
            self._by_adapter.keep_only(fleet.adapters.loaded)
        families = {
            index: snapshot_metrics(
                stats,
                statuses,
                self._config,
                max_model_len=fleet.engines.info.max_model_len,
                served_name=self._served_name,
                now_s=self._epoch_s(),
            )
            for index, (stats, statuses) in snapshots.items()
        }
        scraped = (
            tuple(fleet_metrics(fleet)),
            function_metrics(functions, self._function_counts.sums(functions)) if functions else (),
            by_replica(families) if len(fleet.engines.replicas()) > 1 else chain.from_iterable(families.values()),
            self._registry.collect(),
        )
        return await asyncio.to_thread(FORMATS[kind], Scraped(chain.from_iterable(scraped)))

    def _add(self, name: str, counts: CountOf[float] | CountOf[int]) -> None:
        add = self._histograms[name].add
        for value, count in counts.items():
            add(value, count)

    def _finish(self, request: FinishedRequest) -> None:
        """Count an ended request; one without a token counts in its end-to-end time, sizes and reason alone."""
        self._finished.labels(self._served_name, request.reason).inc()
        values = {
            "e2e_request_latency_seconds": request.e2e_s,
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_generation_tokens": request.num_output_tokens,
            "request_params_max_tokens": request.max_tokens,
            "request_num_preemptions": request.num_preemptions,
        }
        if request.prefill_s is not None and request.decode_s is not None:
            values |= {
                "request_prefill_kv_computed_tokens": request.num_prompt_tokens - request.num_cached_tokens,
                "request_prefill_time_seconds": request.prefill_s,
                "request_decode_time_seconds": request.decode_s,
                "request_inference_time_seconds": request.prefill_s + request.decode_s,
            }
            if request.num_output_tokens > 1:
                values["request_time_per_output_token_seconds"] = request.decode_s / (request.num_output_tokens - 1)
        for name, value in values.items():
            self._histograms[name].add(value)


class _AdapterMetrics:
    """Metrics with a label for the adapter, added as requests end, and dropped with the adapter.

    Tokens per adapter are always kept: two series each, enough to share costs by. Latency histograms are three times
    some twenty series each, too many for a scrape of a thousand adapters, and so an option
    (``has_histograms``). Without it, ``GET /status`` has the last minute's percentiles.

    Above ``max_adapters`` names the oldest makes room: ``keep_only`` runs at scrapes alone, and a server may never be
    scraped.
    """

    def __init__(self, registry: CollectorRegistry, *, has_histograms: bool, max_adapters: int) -> None:
        self._names: dict[str, None] = {}
        self._max_adapters = max_adapters

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["adapter_name"], registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram | None:
            made = has_histograms and Histogram(name, text, ["adapter_name"], registry=registry, buckets=buckets)
            return made or None

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
