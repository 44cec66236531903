"""Prometheus metrics that are read from one snapshot of the engines at the moment of a scrape.

So nothing is counted twice, and an adapter that is unloaded vanishes with its labels. An engine's counters start again
at zero when it is restarted, as Prometheus expects of a restarted process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from manylora.config import EngineConfig
from manylora.engine.status import AdapterStatus, EngineStats
from manylora.types import Tier

__all__ = ["LEVELS", "snapshot_metrics"]

LEVELS = {Tier.DEVICE: "gpu", Tier.HOST: "cpu"}
"""Tiers by the words that routers look for; "gpu" is any device."""


def snapshot_metrics(
    stats: EngineStats, statuses: Sequence[AdapterStatus], config: EngineConfig, *, served_name: str, now_s: float
) -> Iterator[Metric]:
    """Yield the metrics of a snapshot.

    Args:
        stats: Gauges and counters.
        statuses: Every adapter.
        config: The engine's configuration, for the values that are labels.
        served_name: The label ``model_name``.
        now_s: The time in seconds since the epoch.
    """
    yield from _vllm_metrics(stats, statuses, config, served_name, now_s)
    yield from _own_metrics(stats, statuses)
    yield from _adapter_metrics(statuses, served_name)


def _vllm_metrics(
    stats: EngineStats, statuses: Sequence[AdapterStatus], config: EngineConfig, served_name: str, now_s: float
) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([served_name], value)
        return family

    def counter(name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([served_name], value)
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
    yield counter("vllm:num_preemptions", "Requests that were pre-empted.", stats.num_preemptions)
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prompt_tokens)
    yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_cached_tokens)

    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Configuration of the page cache.",
        labels=["block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization"],
    )
    memory = config.memory
    cache.add_metric(
        [
            str(memory.block_size),
            str(stats.num_pages),
            str(memory.prefix_caching),
            str(memory.gpu_memory_utilization),
        ],
        1.0,
    )
    yield cache

    yield gauge("vllm:num_gpu_loaded_lora_adapters", "Adapter versions on the device.", stats.num_resident)
    yield gauge("vllm:num_cpu_loaded_lora_adapters", "Adapter versions in the host tier.", stats.num_host)
    resident = sorted(status.name for status in statuses if status.tier is Tier.DEVICE)
    most = config.scheduler.max_loras or max(1, stats.num_registered)
    lora = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters on the device (running) and with requests waiting; the value is the time.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    lora.add_metric([str(most), ",".join(resident), ",".join(stats.waiting_adapters)], now_s)
    yield lora
    yield gauge("vllm:max_gpu_lora_adapters", "Most adapters in a step.", most)


def _own_metrics(stats: EngineStats, statuses: Sequence[AdapterStatus]) -> Iterator[Metric]:
    pages = GaugeMetricFamily("manylora_pages", "Pages by owner.", labels=["owner"])
    for owner, value in (
        ("free", stats.num_free_pages),
        ("kv", stats.num_kv_pages),
        ("prefix", stats.num_prefix_pages),
        ("adapter", stats.num_adapter_pages),
    ):
        pages.add_metric([owner], value)
    yield pages
    tiers = Counter(status.tier.value for status in statuses)
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
        ("manylora_adapter_prefetches", "Loads begun before their request was admitted.", stats.num_prefetches),
        ("manylora_adapter_evictions", "Adapters evicted from the device.", stats.num_evictions),
        ("manylora_prefix_evictions", "Prefix pages evicted.", stats.num_prefix_evictions),
        ("manylora_lora_requests", "Requests that asked for an adapter.", stats.num_adapter_requests),
        ("manylora_lora_hits", "Requests that found their adapter on the device.", stats.num_adapter_hits),
        ("manylora_steps", "Steps completed.", stats.num_steps),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _adapter_metrics(statuses: Sequence[AdapterStatus], served_name: str) -> Iterator[Metric]:
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "1 for every adapter in memory, by the highest level it is in.",
        labels=["model_name", "adapter_name", "level", "pinned", "rank"],
    )
    requests = CounterMetricFamily("manylora_adapter_requests", "Requests by adapter.", labels=["adapter_name"])
    hits = CounterMetricFamily(
        "manylora_adapter_hits", "Requests that found their adapter on the device.", labels=["adapter_name"]
    )
    for status in statuses:
        if status.tier in LEVELS:
            pinned = str(status.is_pinned).lower()
            rank = str(status.version.rank)
            loaded.add_metric([served_name, status.name, LEVELS[status.tier], pinned, rank], 1.0)
        requests.add_metric([status.name], status.num_requests)
        hits.add_metric([status.name], status.num_hits)
    yield loaded
    yield requests
    yield hits
