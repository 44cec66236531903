"""Prometheus metrics that are read from one snapshot of the engines at the moment of a scrape.

So nothing is counted twice, and an adapter that is unloaded vanishes with its labels. An engine's counters start again
at zero when it is restarted, as Prometheus expects of a restarted process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from manylora.core.config import EngineConfig
from manylora.core.engine.status import AdapterStatus, EngineStats
from manylora.core.types import Tier
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.ports import ServedFleet

__all__ = ["LEVELS", "by_replica", "fleet_metrics", "snapshot_metrics"]

LEVELS = {Tier.DEVICE: "gpu", Tier.HOST: "cpu"}
"""Tiers by the words that routers look for; "gpu" is any device."""


def fleet_metrics(fleet: ServedFleet) -> Iterator[Metric]:
    """Yield the metrics that the API process knows itself."""
    replicas, resumes = fleet.replicas(), fleet.resumes
    labels = ["replica"] if fleet.num_replicas > 1 else []
    values = [[str(replica.index)] if labels else [] for replica in replicas]
    up = zip(values, (float(replica.state is EngineState.SERVING) for replica in replicas), strict=True)
    restarts = zip(values, (float(replica.num_restarts) for replica in replicas), strict=True)
    in_flight = zip(values, (float(replica.num_in_flight) for replica in replicas), strict=True)
    started = "Engines started after the first."
    yield _family(GaugeMetricFamily, "manylora_engine_up", "Whether the engine serves.", labels, up)
    yield _family(CounterMetricFamily, "manylora_engine_restarts", started, labels, restarts)
    yield _family(GaugeMetricFamily, "manylora_engine_requests", "Requests given to the engine.", labels, in_flight)
    by_state = fleet.num_by_state()
    states = [([state.value], float(by_state[state])) for state in EngineState]
    yield _family(GaugeMetricFamily, "manylora_replicas", "Engines by state.", ["state"], states)
    wanted = fleet.num_replicas if fleet.scaling is None else fleet.scaling.num_wanted
    yield GaugeMetricFamily("manylora_replicas_wanted", "Engines that scaling wants to serve.", value=wanted)
    for name, text, count in (
        ("manylora_resumes", "Times that a request of a lost engine was given to another.", resumes.num_resumes),
        ("manylora_resumed_requests", "Requests that went on elsewhere at least once.", resumes.num_resumed),
        ("manylora_unresumed_requests", "Requests that ended because their engine was lost.", resumes.num_ended),
        ("manylora_poison_requests", "Those on which engines died twice.", resumes.num_poison),
    ):
        yield CounterMetricFamily(name, text, value=count)
    for name, text, value in (
        ("manylora_requests_between_engines", "Requests that wait for another engine.", resumes.num_waiting),
        ("manylora_longest_resume_pause_seconds", "Longest time without a token by a loss.", resumes.longest_pause_s),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def by_replica(families: Mapping[int, Iterable[Metric]]) -> Iterator[Metric]:
    """Yield the metrics of several engines, with the label ``replica``."""
    merged: dict[str, Metric] = {}
    for index, own in families.items():
        for family in own:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, "replica": str(index)}, sample.value)
    yield from merged.values()


def snapshot_metrics(
    stats: EngineStats, statuses: Sequence[AdapterStatus], config: EngineConfig, *, served_name: str, now_s: float
) -> Iterator[Metric]:
    """Yield the metrics of a snapshot.

    Args:
        stats: Gauges and counters.
        statuses: The adapters in use.
        config: The engine's configuration, for the values that are labels.
        served_name: The label ``model_name``.
        now_s: The time in seconds since the epoch.
    """
    yield from _vllm_metrics(stats, statuses, config, served_name, now_s)
    yield from _own_metrics(stats)
    yield from _adapter_metrics(statuses, served_name)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Return a metric with a sample for each of the given values of its labels."""
    family = kind(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _vllm_metrics(
    stats: EngineStats, statuses: Sequence[AdapterStatus], config: EngineConfig, served_name: str, now_s: float
) -> Iterator[Metric]:
    memory = config.memory
    kv_share = stats.num_kv_pages / stats.num_pages
    most = config.scheduler.max_loras or max(1, stats.num_registered)
    for name, text, value in (
        ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
        ("vllm:num_requests_waiting", "Requests waiting.", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of all pages that running requests hold.", kv_share),
        ("vllm:gpu_cache_usage_perc", "The same, by its older name.", kv_share),
        ("vllm:num_gpu_loaded_lora_adapters", "Adapter versions on the device.", stats.num_resident),
        ("vllm:num_cpu_loaded_lora_adapters", "Adapter versions in the host tier.", stats.num_host),
        ("vllm:max_gpu_lora_adapters", "Most adapters in a step.", most),
    ):
        yield _family(GaugeMetricFamily, name, text, ["model_name"], [([served_name], value)])
    for name, text, value in (
        ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.num_prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens),
        ("vllm:num_preemptions", "Requests that were pre-empted.", stats.num_preemptions),
        ("vllm:prompt_tokens_cached", "Those that the prefix cache held.", stats.num_cached_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prompt_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_cached_tokens),
        ("vllm:gpu_prefix_cache_queries", "The same, by its older name.", stats.num_prompt_tokens),
        ("vllm:gpu_prefix_cache_hits", "The same, by its older name.", stats.num_cached_tokens),
    ):
        yield _family(CounterMetricFamily, name, text, ["model_name"], [([served_name], value)])
    num_deferred = min(
        stats.num_waiting, sum(status.num_waiting for status in statuses if status.tier is not Tier.DEVICE)
    )
    yield _family(
        GaugeMetricFamily,
        "vllm:num_requests_waiting_by_reason",
        "Requests waiting: deferred until their adapter is on the device, the others for capacity.",
        ["model_name", "reason"],
        [([served_name, "capacity"], stats.num_waiting - num_deferred), ([served_name, "deferred"], num_deferred)],
    )
    sources = {
        "local_compute": stats.num_prompt_tokens - stats.num_cached_tokens,
        "local_cache_hit": stats.num_cached_tokens,
    }
    yield _family(
        CounterMetricFamily,
        "vllm:prompt_tokens_by_source",
        "Prompt tokens, computed or from the prefix cache.",
        ["model_name", "source"],
        [([served_name, source], num) for source, num in sources.items()],
    )
    labels = {
        "block_size": memory.block_size,
        "num_gpu_blocks": stats.num_pages,
        "enable_prefix_caching": memory.prefix_caching,
        "gpu_memory_utilization": memory.gpu_memory_utilization,
    }
    values = list(map(str, labels.values()))
    about = "Configuration of the page cache."
    yield _family(GaugeMetricFamily, "vllm:cache_config_info", about, list(labels), [(values, 1.0)])
    resident = ",".join(sorted(status.name for status in statuses if status.tier is Tier.DEVICE))
    yield _family(
        GaugeMetricFamily,
        "vllm:lora_requests_info",
        "Adapters on the device (running) and with requests waiting; the value is the time.",
        ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        [([str(most), resident, ",".join(stats.waiting_adapters)], now_s)],
    )


def _own_metrics(stats: EngineStats) -> Iterator[Metric]:
    pages = {
        "free": stats.num_free_pages,
        "kv": stats.num_kv_pages,
        "prefix": stats.num_prefix_pages,
        "adapter": stats.num_adapter_pages,
    }
    tiers = {Tier.DISK: stats.num_only_disk, Tier.HOST: stats.num_only_host, Tier.DEVICE: stats.num_resident}
    loads = {Tier.DEVICE: stats.num_loads, Tier.HOST: stats.num_disk_loads}
    by_owner = [([owner], num) for owner, num in pages.items()]
    by_tier = [([tier.value], tiers[tier]) for tier in Tier]
    loads_by_tier = [([tier.value], num) for tier, num in loads.items()]
    yield _family(GaugeMetricFamily, "manylora_pages", "Pages by owner.", ["owner"], by_owner)
    yield _family(GaugeMetricFamily, "manylora_adapters", "Adapter versions by highest tier.", ["tier"], by_tier)
    yield _family(CounterMetricFamily, "manylora_adapter_loads", "Adapter loads completed.", ["tier"], loads_by_tier)
    for name, text, field in (
        ("manylora_cold_starts", "Requests that got a first token, their adapter missing at first.", "num_starts"),
        ("manylora_cold_starts_measured", "Those that waited for nothing but their adapter.", "num_measured"),
        ("manylora_cold_start_expected_seconds", "Their predicted times to first token, summed.", "expected_s"),
        ("manylora_cold_start_actual_seconds", "Their actual times to first token, summed.", "actual_s"),
    ):
        by_mode = [([one.mode], getattr(one, field)) for one in stats.cold_starts]
        yield _family(CounterMetricFamily, name, text, ["mode"], by_mode)
    errors = [([one.mode], one.error_s) for one in stats.cold_starts]
    text = "Mean absolute error of the predicted times to first token of cold requests."
    yield _family(GaugeMetricFamily, "manylora_cold_start_error_seconds", text, ["mode"], errors)
    for name, text, value in (
        ("manylora_adapters_registered", "Registered adapter names.", stats.num_registered),
        ("manylora_adapters_resident", "Adapter versions on the device.", stats.num_resident),
        ("manylora_adapters_loading", "Adapter versions on their way to the device.", stats.num_loading),
        ("manylora_adapters_active", "Adapter versions that running requests use.", stats.num_active),
        ("manylora_adapters_failed", "Adapter versions whose weights could not be read.", stats.num_failed),
        ("manylora_host_adapters", "Adapter versions in the host tier.", stats.num_host),
        ("manylora_host_bytes", "Bytes of the host tier in use.", stats.host_bytes),
    ):
        yield GaugeMetricFamily(name, text, value=value)
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
    yield _family(
        GaugeMetricFamily,
        "vllm:lora_adapter_loaded",
        "1 for every adapter in memory that is on the device or was requested, by its highest level.",
        ["model_name", "adapter_name", "level", "pinned", "rank"],
        [
            ([served_name, one.name, LEVELS[one.tier], str(one.is_pinned).lower(), str(one.version.rank)], 1.0)
            for one in statuses
            if one.tier in LEVELS
        ],
    )
    requests = [([one.name], one.num_requests) for one in statuses]
    hits = [([one.name], one.num_hits) for one in statuses]
    text = "Requests that found their adapter on the device."
    yield _family(CounterMetricFamily, "manylora_adapter_requests", "Requests by adapter.", ["adapter_name"], requests)
    yield _family(CounterMetricFamily, "manylora_adapter_hits", text, ["adapter_name"], hits)
