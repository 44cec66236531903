"""Prometheus metrics that are read from one snapshot of the engines at the moment of a scrape.

So nothing is counted twice, and an adapter that is unloaded vanishes with its labels. An engine's counters start again
at zero when it is restarted, as Prometheus expects of a restarted process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from manylora.core.config import EngineConfig
from manylora.core.engine.status import AdapterStatus, EngineStats
from manylora.core.types import Tier
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.metrics.merged import merge_family
from manylora.serving.metrics.status_report import FunctionState
from manylora.serving.ports import FleetPort

__all__ = [
    "LEVELS",
    "FunctionCounts",
    "SharedScrape",
    "by_replica",
    "fleet_metrics",
    "function_metrics",
    "snapshot_metrics",
]

LEVELS = {Tier.DEVICE: "gpu", Tier.HOST: "cpu"}  # tiers by the words that routers look for; "gpu" is any device

Kind: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]
Rows: TypeAlias = Sequence[tuple[Kind, str, str, str]]
"""Kind, name and description of metrics, and the field that has the value."""

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily

RESUMES: Rows = (
    (COUNTER, "manylora_resumes", "Times that a request of a lost engine was given to another.", "num_resumes"),
    (COUNTER, "manylora_resumed_requests", "Requests that went on elsewhere at least once.", "num_resumed"),
    (COUNTER, "manylora_unresumed_requests", "Requests that ended because their engine was lost.", "num_ended"),
    (COUNTER, "manylora_poison_requests", "Those on which engines died twice.", "num_poison"),
    (GAUGE, "manylora_requests_between_engines", "Requests that wait for another engine.", "num_waiting"),
    (GAUGE, "manylora_longest_resume_pause_seconds", "Longest time without a token by a loss.", "longest_pause_s"),
)
VLLM: Rows = (
    (GAUGE, "vllm:num_requests_running", "Requests in the running batch.", "num_running"),
    (GAUGE, "vllm:num_requests_waiting", "Requests waiting.", "num_waiting"),
    (GAUGE, "vllm:num_gpu_loaded_lora_adapters", "Adapter versions on the device.", "num_resident"),
    (GAUGE, "vllm:num_cpu_loaded_lora_adapters", "Adapter versions in the host tier.", "num_host"),
    (COUNTER, "vllm:prompt_tokens", "Prompt tokens of admitted requests.", "num_prompt_tokens"),
    (COUNTER, "vllm:generation_tokens", "Tokens generated.", "num_generated_tokens"),
    (COUNTER, "vllm:num_preemptions", "Requests that were pre-empted.", "num_preemptions"),
    (COUNTER, "vllm:prompt_tokens_cached", "Those that the prefix cache held.", "num_cached_tokens"),
    (COUNTER, "vllm:prefix_cache_queries", "Prompt tokens looked up.", "num_prompt_tokens"),
    (COUNTER, "vllm:prefix_cache_hits", "Prompt tokens found.", "num_cached_tokens"),
    (COUNTER, "vllm:gpu_prefix_cache_queries", "The same, by its older name.", "num_prompt_tokens"),
    (COUNTER, "vllm:gpu_prefix_cache_hits", "The same, by its older name.", "num_cached_tokens"),
)
OWN: Rows = (
    (GAUGE, "manylora_adapters_registered", "Registered adapter names.", "num_registered"),
    (GAUGE, "manylora_adapters_resident", "Adapter versions on the device.", "num_resident"),
    (GAUGE, "manylora_adapters_loading", "Adapter versions on their way to the device.", "num_loading"),
    (GAUGE, "manylora_adapters_active", "Adapter versions that running requests use.", "num_active"),
    (GAUGE, "manylora_adapters_failed", "Adapter versions whose weights could not be read.", "num_failed"),
    (GAUGE, "manylora_host_adapters", "Adapter versions in the host tier.", "num_host"),
    (GAUGE, "manylora_host_bytes", "Bytes of the host tier in use.", "host_bytes"),
    (COUNTER, "manylora_adapter_prefetches", "Loads begun before their request was admitted.", "num_prefetches"),
    (COUNTER, "manylora_adapter_evictions", "Adapters evicted from the device.", "num_evictions"),
    (COUNTER, "manylora_prefix_evictions", "Prefix pages evicted.", "num_prefix_evictions"),
    (COUNTER, "manylora_lora_requests", "Requests that asked for an adapter.", "num_adapter_requests"),
    (COUNTER, "manylora_lora_hits", "Requests that found their adapter on the device.", "num_adapter_hits"),
    (COUNTER, "manylora_lora_not_activated", "Requests whose prompt does not activate theirs.", "num_not_activated"),
    (COUNTER, "manylora_steps", "Steps completed.", "num_steps"),
)
COLD_STARTS: Rows = (
    (COUNTER, "manylora_cold_starts", "Requests that got a first token, their adapter missing at first.", "num_starts"),
    (COUNTER, "manylora_cold_starts_measured", "Those that waited for nothing but their adapter.", "num_measured"),
    (COUNTER, "manylora_cold_start_expected_seconds", "Their predicted times to first token, summed.", "expected_s"),
    (COUNTER, "manylora_cold_start_actual_seconds", "Their actual times to first token, summed.", "actual_s"),
    (
        GAUGE,
        "manylora_cold_start_error_seconds",
        "Mean absolute error of the predicted times to first token of cold requests.",
        "error_s",
    ),
)


def _rows(rows: Rows, sources: Iterable[tuple[Sequence[str], object]], *labels: str) -> Iterator[Metric]:
    """Yield the metrics of a table, with a sample for each source; with a source come the values of its labels."""
    given = list(sources)
    for kind, name, text, field in rows:
        yield _family(kind, name, text, labels, [(values, getattr(source, field)) for values, source in given])


def _family(
    kind: Kind, name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a metric with a sample for each of the given values of its labels."""
    family = kind(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _by(kind: Kind, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a metric with one label."""
    return _family(kind, name, text, [label], [([value], number) for value, number in values.items()])


def fleet_metrics(fleet: FleetPort) -> Iterator[Metric]:
    """Yield the metrics that the API process knows itself."""
    all_replicas = fleet.engines.replicas()
    labels = ["replica"] if len(all_replicas) > 1 else []
    replicas = [([str(one.index)] if labels else [], one) for one in all_replicas if one.state is not EngineState.IDLE]
    up = [
        (values, float(one.state is EngineState.SERVING))
        for values, one in replicas
        if one.state is not EngineState.STOPPED
    ]
    yield _family(GAUGE, "manylora_engine_up", "Whether the engine serves; none once it was drained.", labels, up)
    yield from _rows(
        (
            (COUNTER, "manylora_engine_restarts", "Engines started after the first.", "num_restarts"),
            (GAUGE, "manylora_engine_requests", "Requests given to the engine.", "num_in_flight"),
        ),
        replicas,
        *labels,
    )
    by_state = Counter(one.state for one in all_replicas)
    yield _by(
        GAUGE, "manylora_replicas", "Engines by state.", "state", {one.value: by_state[one] for one in EngineState}
    )
    wanted = len(all_replicas) if fleet.scaling is None else fleet.scaling.num_wanted
    yield GAUGE("manylora_replicas_wanted", "Engines that scaling wants to serve.", value=wanted)
    yield from _rows(RESUMES, [((), fleet.resumes)])


def by_replica(families: Mapping[int, Iterable[Metric]]) -> Iterator[Metric]:
    """Yield the metrics of several engines, with the label ``replica``."""
    merged: dict[str, Metric] = {}
    for index, own in families.items():
        for family in own:
            merge_family(merged, family, {"replica": str(index)})
    yield from merged.values()


def snapshot_metrics(
    stats: EngineStats,
    statuses: Sequence[AdapterStatus],
    config: EngineConfig,
    *,
    max_model_len: int,
    served_name: str,
    now_s: float,
) -> Iterator[Metric]:
    """Yield the metrics of a snapshot."""
    yield from _rows(VLLM, [([served_name], stats)], "model_name")
    yield from _computed_vllm_metrics(stats, statuses, config, served_name)
    yield _cache_config(stats, config, max_model_len)
    on_device = ",".join(sorted(status.name for status in statuses if status.tier is Tier.DEVICE))
    yield _family(
        GAUGE,
        "vllm:lora_requests_info",
        "Adapters on the device (running) and with requests waiting; the value is the time.",
        ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        [([str(_max_adapters(stats, config)), on_device, ",".join(stats.waiting_adapters)], now_s)],
    )
    yield from _own_metrics(stats)
    yield from _adapter_metrics(statuses, served_name)


def _max_adapters(stats: EngineStats, config: EngineConfig) -> int:
    """Return the most adapters in a step."""
    return config.scheduler.max_loras or max(1, stats.num_registered)


def _computed_vllm_metrics(
    stats: EngineStats, statuses: Sequence[AdapterStatus], config: EngineConfig, served_name: str
) -> Iterator[Metric]:
    kv_share = stats.num_kv_pages / stats.num_pages
    for name, text, value in (
        ("vllm:kv_cache_usage_perc", "Share of all pages that running requests hold.", kv_share),
        ("vllm:gpu_cache_usage_perc", "The same, by its older name.", kv_share),
        ("vllm:max_gpu_lora_adapters", "Most adapters in a step.", _max_adapters(stats, config)),
    ):
        yield _by(GAUGE, name, text, "model_name", {served_name: value})
    num_deferred = min(
        stats.num_waiting, sum(status.num_waiting for status in statuses if status.tier is not Tier.DEVICE)
    )
    yield _family(
        GAUGE,
        "vllm:num_requests_waiting_by_reason",
        "Requests waiting: deferred until their adapter is on the device, the others for capacity.",
        ["model_name", "reason"],
        [([served_name, "capacity"], stats.num_waiting - num_deferred), ([served_name, "deferred"], num_deferred)],
    )
    num_computed = stats.num_prompt_tokens - stats.num_cached_tokens
    yield _family(
        COUNTER,
        "vllm:prompt_tokens_by_source",
        "Prompt tokens, computed or from the prefix cache.",
        ["model_name", "source"],
        [([served_name, "local_compute"], num_computed), ([served_name, "local_cache_hit"], stats.num_cached_tokens)],
    )


def _cache_config(stats: EngineStats, config: EngineConfig, max_model_len: int) -> Metric:
    num_tokens = stats.num_pages * config.memory.block_size
    labels = {
        "block_size": config.memory.block_size,
        "num_gpu_blocks": stats.num_pages,
        "enable_prefix_caching": config.memory.prefix_caching,
        "gpu_memory_utilization": config.memory.gpu_memory_utilization,
        "kv_cache_size_tokens": num_tokens,
        "kv_cache_max_concurrency": num_tokens / max_model_len,
    }
    values = list(map(str, labels.values()))
    return _family(GAUGE, "vllm:cache_config_info", "Configuration of the page cache.", list(labels), [(values, 1.0)])


def _own_metrics(stats: EngineStats) -> Iterator[Metric]:
    pages = {
        "free": stats.num_free_pages,
        "kv": stats.num_kv_pages,
        "prefix": stats.num_prefix_pages,
        "adapter": stats.num_adapter_pages,
    }
    tiers = {Tier.DISK: stats.num_only_disk, Tier.HOST: stats.num_only_host, Tier.DEVICE: stats.num_resident}
    loads = {Tier.DEVICE.value: stats.num_loads, Tier.HOST.value: stats.num_disk_loads}
    by_tier = {tier.value: tiers[tier] for tier in Tier}
    yield _by(GAUGE, "manylora_pages", "Pages by owner.", "owner", pages)
    yield _by(GAUGE, "manylora_adapters", "Adapter versions by highest tier.", "tier", by_tier)
    yield _by(COUNTER, "manylora_adapter_loads", "Adapter loads completed.", "tier", loads)
    yield from _rows(COLD_STARTS, [([one.mode], one) for one in stats.cold_starts], "mode")
    yield from _rows(OWN, [((), stats)])


def _adapter_metrics(statuses: Sequence[AdapterStatus], served_name: str) -> Iterator[Metric]:
    yield _family(
        GAUGE,
        "vllm:lora_adapter_loaded",
        "1 for every adapter in memory that is on the device or was requested, by its highest level.",
        ["model_name", "adapter_name", "level", "pinned", "rank"],
        [
            ([served_name, one.name, LEVELS[one.tier], str(one.is_pinned).lower(), str(one.version.rank)], 1.0)
            for one in statuses
            if one.tier in LEVELS
        ],
    )
    yield from _rows(
        (
            (COUNTER, "manylora_adapter_requests", "Requests by adapter.", "num_requests"),
            (COUNTER, "manylora_adapter_hits", "Requests that found their adapter on the device.", "num_hits"),
        ),
        [([one.name], one) for one in statuses],
        "adapter_name",
    )


class FunctionCounts:
    """The processes of functions that were started and that died, with those of functions that were removed since.

    To Prometheus a counter that goes back has begun anew, so a sum must keep what a function leaves.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}  # of each function, at the last look
        self._gone = (0, 0)

    def sums(self, states: Sequence[FunctionState]) -> tuple[int, int]:
        """Return the numbers of starts and deaths until now."""
        counts = {one.name: (one.num_starts, one.num_deaths) for one in states}
        for name, last in self._last.items():
            now = counts.get(name, (0, 0))
            if now[0] < last[0] or now[1] < last[1]:  # it was removed, or another has its name
                self._gone = self._gone[0] + last[0], self._gone[1] + last[1]
        self._last = counts
        every = [self._gone, *counts.values()]
        return sum(one[0] for one in every), sum(one[1] for one in every)


def function_metrics(states: Sequence[FunctionState], sums: tuple[int, int]) -> Iterator[Metric]:
    """Yield the metrics of functions, with ``FunctionCounts.sums``; a function has series of its own while awake."""
    num_starts, num_deaths = sums
    awake = [one for one in states if one.state == "awake"]
    by_state = Counter(one.state for one in states)
    missing = Counter(note.name for one in awake for note in one.missing)
    yield _by(GAUGE, "manylora_functions", "Functions that have been awake, by state.", "state", by_state)
    yield _by(
        GAUGE,
        "manylora_function_memory_bytes",
        "Proportional set size of a function's process.",
        "function",
        {one.name: one.pss_bytes for one in awake},
    )
    yield _by(
        GAUGE,
        "manylora_function_isolation_missing",
        "Functions awake without a measure of isolation.",
        "measure",
        missing,
    )
    for name, text, value in (
        ("manylora_function_starts", "Processes of functions that were woken.", num_starts),
        ("manylora_function_deaths", "Processes of functions that died.", num_deaths),
    ):
        yield COUNTER(name, text, value=value)
    yield _family(
        GAUGE,
        "manylora_function_start_seconds",
        "The last start of a function that is awake.",
        ["function", "stage"],
        [
            ([one.name, stage], took_s)
            for one in awake
            if one.last_start is not None
            for stage, took_s in one.last_start.stages_s.items()
        ],
    )


class SharedScrape:
    """Runs scrapes one after another; all that come while one runs share the next.

    So a flood of ``GET /metrics`` does not keep the engines at counting. No scrape is given a result that was begun
    before it came, so it has all that happened before. A run that waited for the one before waits as long again, so
    that a flood of scrapes takes half of the time at most.

    ::

        run      |---- 1 ----|           |---- 2 ----|
        comes    a    b  c                    d           a gets 1, b and c get 2, d gets 3
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def get(self, scrape: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the result of a run of ``scrape`` that begins from now on; its errors are raised here."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(scrape, self._running))
        return await asyncio.shield(self._next)  # a client that leaves does not end it for the others

    async def _run(self, scrape: Callable[[], Awaitable[bytes]], before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None and not before.done():
            loop = asyncio.get_running_loop()
            came_at = loop.time()
            await asyncio.wait([before])
            await asyncio.sleep(loop.time() - came_at)
        self._running, self._next = self._next, None
        return await scrape()
