"""Figures of the plug-in in vLLM's own metrics, under names that begin with ``manylora:``.

``manylora:lora_adapter_loaded`` has a series for each adapter in a slot (``level="device"``) or in host memory, with
its rank. Routers read it: vLLM's ``lora_requests_info`` tells which adapters have requests, not where weights are.
"""

from __future__ import annotations

from collections import Counter as Sums
from dataclasses import asdict
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from manylora.core.events import AdapterLoaded, Event, RequestAdmitted
from manylora.vllm.gate import RequestGate
from manylora.vllm.plugin import chosen_options

__all__ = ["AdapterPromMetrics", "AdapterRecorder", "AdapterStats"]

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
"""The core's counters and the recorder's own, by metric."""


class AdapterRecorder:
    """Listens to the core's events in the engine's process; its sums are those since the start."""

    def __init__(self) -> None:
        self.sums: Sums[str] = Sums()
        self._last: dict[str, Any] = {}

    def heard(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, AdapterLoaded):
            self.sums["num_failed"] += event.error is not None
            self.sums[f"{event.tier.value}_s"] += event.took_s  # type: ignore[assignment]
        elif isinstance(event, RequestAdmitted) and not event.adapter_was_resident:
            self.sums["waited_s"] += event.waited_s  # type: ignore[assignment]

    def take(self, gate: RequestGate) -> AdapterStats | None:
        """Return the figures, ``None`` if they are those of the last call."""
        known = {**asdict(gate.counters), **self.sums}
        figures = {"counts": {name: known.get(key, 0) for name, key in COUNTERS.items()}, "loaded": gate.residency()}
        if figures == self._last:
            return None
        self._last = figures
        return AdapterStats(data=figures)


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
        self._counters = {
            name: metric_types[Counter](f"manylora:{name}", f"{name.replace('_', ' ')}, in all.", labelnames)
            for name in COUNTERS
        }
        text, names = "1 for an adapter in a slot (device) or in host memory.", ("adapter_name", "level", "rank")
        self._loaded = metric_types[Gauge]("manylora:lora_adapter_loaded", text, [*labelnames, *names])
        labels = {key: str(value) for key, value in (chosen_options(vllm_config.kv_transfer_config) or {}).items()}
        info = metric_types[Gauge]("manylora:plugin_info", "The options that were given.", [*labelnames, *labels])
        for values in engines.values():
            info.labels(*values, *labels.values()).set(1)
        self._last: dict[int, dict[str, Any]] = {}  # by engine

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in the figures of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        counts = transfer_stats_data["counts"]
        series = {(*labels, name, level, str(rank)) for name, (level, rank) in transfer_stats_data["loaded"].items()}
        last = self._last.get(engine_idx, {"counts": dict.fromkeys(COUNTERS, 0), "series": set()})
        for name, count in counts.items():
            self._counters[name].labels(*labels).inc(count - last["counts"][name])
        for gone in last["series"] - series:
            self._loaded.remove(*gone)
        for one in series:
            self._loaded.labels(*one).set(1)
        self._last[engine_idx] = {"counts": counts, "series": series}
