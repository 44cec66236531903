"""Figures of the plug-in in vLLM's own metrics, under names that begin with ``manylora:``.

``manylora:lora_adapter_loaded`` has a series for each adapter in a slot (``level="device"``) or in host memory, with
its rank. Routers read it: vLLM's ``lora_requests_info`` tells which adapters have requests, not where weights are.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from manylora.vllm.plugin import chosen_options

__all__ = ["COUNTERS", "AdapterPromMetrics", "AdapterStats"]

COUNTERS = {
    "adapter_requests": "num_adapter_requests",
    "adapter_hits": "num_adapter_hits",
    "adapter_prefetches": "num_prefetches",
    "adapter_evictions": "num_evictions",
    "adapter_reads": "num_disk_loads",
    "adapter_copies": "num_loads",
    "adapter_load_failures": "num_failed",
    "adapter_blocking_loads": "num_blocking",
    "adapter_read_seconds": "host_s",
    "adapter_copy_seconds": "device_s",
    "adapter_wait_seconds": "waited_s",
}
"""The gate's counts, by metric."""


class AdapterStats(KVConnectorStats):  # type: ignore[misc]
    """Figures on their way from an engine to the API's process."""

    def aggregate(self, other: AdapterStats) -> AdapterStats:
        """Return the later figures."""
        return other

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of a line in vLLM's log."""
        levels = [level for level, _ in self.data["loaded"].values()]
        return {**self.data["counts"], "on_device": levels.count("device"), "in_host_only": levels.count("host")}

    def is_empty(self) -> bool:
        """Return whether there are no figures."""
        return not self.data


class AdapterPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics at ``/metrics``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], engines: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engines)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._counters = {
            name: counter(f"manylora:{name}", f"{name.replace('_', ' ')}, in all.", labelnames) for name in COUNTERS
        }
        text, names = "1 for an adapter in a slot (device) or in host memory.", ("adapter_name", "level", "rank")
        self._loaded = gauge("manylora:lora_adapter_loaded", text, [*labelnames, *names])
        labels = {key: str(value) for key, value in (chosen_options(vllm_config.kv_transfer_config) or {}).items()}
        info = gauge("manylora:plugin_info", "The options that were given.", [*labelnames, *labels])
        for values in engines.values():
            info.labels(*values, *labels.values()).set(1)
        self._last: dict[int, tuple[dict[str, float], set[tuple[Any, ...]]]] = {}  # by engine: counts and series

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in the figures of an engine."""
        labels, counts = self.per_engine_labelvalues[engine_idx], transfer_stats_data["counts"]
        series = {(*labels, name, level, str(rank)) for name, (level, rank) in transfer_stats_data["loaded"].items()}
        old_counts, old_series = self._last.get(engine_idx, ({}, set()))
        for name, count in counts.items():
            self._counters[name].labels(*labels).inc(count - old_counts.get(name, 0))
        for gone in old_series - series:
            self._loaded.remove(*gone)
        for one in series:
            self._loaded.labels(*one).set(1)
        self._last[engine_idx] = counts, series
