"""The connector: the gate beside vLLM's scheduler, and the slots beside its model, as vLLM's interface has them.

It transfers no KV. It uses the answer "ask again later", the metadata that goes to workers with each step and comes
back, and the failure of a transfer, by which vLLM ends a request whose adapter cannot be read::

    scheduler   on_new_request -> get_num_new_matched_tokens ... -> update_state_after_alloc -> build_connector_meta
    workers                bind_connector_metadata -> (the model runs) -> build_connector_worker_meta
    scheduler                                                             update_connector_output, request_finished

Figures are in vLLM's own metrics, under names that begin with ``manylora:``. ``manylora:lora_adapter_loaded`` has a
series for each adapter in a slot (``level="device"``) or in host memory, with its rank. Routers read it: vLLM's
``lora_requests_info`` tells which adapters have requests, not where weights are.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from manylora.core.logs import escape
from manylora.core.types import Request, SamplingParams
from manylora.vllm.gate import RequestGate
from manylora.vllm.messages import Report, SlotOrders
from manylora.vllm.plugin import check_engine, chosen_options
from manylora.vllm.worker import current

__all__ = ["ManyloraConnector"]

logger = logging.getLogger("vllm.manylora")  # in vLLM's log, by its settings


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


class OrdersMetadata(SlotOrders, base.KVConnectorMetadata):  # type: ignore[misc]
    """Orders, as vLLM carries them to workers."""


class ReportMetadata(Report, base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A report, as vLLM carries it back."""


class ManyloraConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Holds requests whose adapter is not in a slot, and moves adapters beside the steps; one for each side."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options, self._is_scheduler = check_engine(vllm_config), role == base.KVConnectorRole.SCHEDULER
        if self._is_scheduler:
            self._gate = RequestGate(options)
            self._figures: dict[str, Any] = {}  # the last ones
            self._waiting: dict[str, Any] = {}  # vLLM's requests of adapters that have not been scheduled yet
            self._held_back: set[str] = set()  # they skip the prefix cache, and with it vLLM's question
            self._last_step: tuple[int, float] | None = None  # tokens, and the time of its scheduling
        else:
            self._failed: set[str] = set()
            self._slots, self._slots.is_blocking = current[0], options.blocking_loads

    # -- beside the scheduler ----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Add a request, which from now on has the adapter's version of this moment."""
        lora, sampling, priority = request.lora_request, SamplingParams(max_tokens=request.max_tokens), request.priority
        prompt = (0,) * request.num_prompt_tokens
        made = Request(request_id=request.request_id, prompt=prompt, sampling=sampling, priority=priority)
        asked = None if lora is None else (lora.lora_name, lora.lora_path)
        if (ref := self._gate.add(made, asked, time.monotonic())) is None:
            request.lora_request = None  # of no adapter, or doomed: vLLM would not ask while others have all slots
        else:
            request.lora_request = LoRARequest(ref.name, ref.number, ref.path, is_3d_lora_weight=lora.is_3d_lora_weight)
            self._waiting[request.request_id] = request
            if ref.name != lora.lora_name:
                request.block_hashes = []  # made of the name
                request.update_block_hashes()
        if request.skip_reading_prefix_cache:
            request.skip_reading_prefix_cache = False
            self._held_back.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answer 0 if a request may run, ``None`` if it waits, and a transfer that will fail if it cannot run."""
        request_id = request.request_id
        may_run = self._gate.may_run(request_id, time.monotonic())
        if request_id in self._gate.doomed:
            return 1, True
        if not may_run:
            return None, False
        if request_id in self._held_back:  # it has its slot; the prefix cache was read for it in this pass
            self._held_back.remove(request_id)
            request.skip_reading_prefix_cache = True
            return None, False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Learn that a request got its blocks."""
        if (error := self._gate.doomed.get(request.request_id)) is not None:
            logger.error("request_failed request=%s error=%s", request.request_id, escape(error))
        self._waiting.pop(request.request_id, None)
        self._gate.scheduled(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> OrdersMetadata:
        """End the scheduling of a step."""
        now, num_tokens = time.monotonic(), scheduler_output.total_num_scheduled_tokens
        if self._last_step is not None and num_tokens:
            self._gate.stepped(self._last_step[0], now - self._last_step[1])
        self._last_step = (num_tokens, now) if num_tokens else None
        orders = self._gate.end_step(now)
        return OrdersMetadata(orders.orders, orders.failed, is_empty=not num_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the report of workers."""
        if (report := connector_output.kv_connector_worker_meta) is not None:
            self._gate.learn(report, time.monotonic())
            for request_id in self._gate.doomed.keys() & self._waiting.keys():
                self._waiting.pop(request_id).lora_request = None  # as of one that is doomed from the first

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Take out a request that ended, for any reason."""
        is_whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        self._held_back.discard(request.request_id)
        self._waiting.pop(request.request_id, None)
        self._gate.finish(request.request_id, request.num_output_tokens, time.monotonic(), is_whole=is_whole)
        return False, None

    request_finished_all_groups = request_finished

    # -- beside the model --------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: OrdersMetadata) -> None:
        """Begin a step: start the work that it brings."""
        super().bind_connector_metadata(connector_metadata)
        self._slots.begin(connector_metadata.orders)
        self._failed.update(connector_metadata.failed)

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Let the transfers fail of requests whose adapter cannot be read."""
        failed, self._failed = self._failed, set()
        return base.KVConnectorTransferResults(finished_recving=failed, failed_recving=failed)

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        """Report the work that is done."""
        report = self._slots.report(waits=self._get_connector_metadata().is_empty)
        return ReportMetadata(report.done, report.num_blocking) if report.done or report.num_blocking else None

    def _transfer_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no KV is transferred."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _transfer_nothing

    def shutdown(self) -> None:
        """End the threads that read adapters, after the work that they are at."""
        if not self._is_scheduler:
            self._slots.threads.shutdown()

    def reset_cache(self) -> bool:
        """There is no KV to forget."""
        return True

    # -- metrics -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> AdapterStats | None:
        """Return the scheduler's figures, unless they are those of the last call."""
        if not self._is_scheduler:
            return None
        known = {**asdict(self._gate.counters), **self._gate.sums}
        counts = {name: known.get(key, 0) for name, key in COUNTERS.items()}
        last, self._figures = self._figures, {"counts": counts, "loaded": self._gate.residency()}
        return None if last == self._figures else AdapterStats(data=self._figures)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> AdapterStats:
        """Return figures that came from the engine's process."""
        return AdapterStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> AdapterPromMetrics:
        """Return the metrics of the plug-in."""
        return AdapterPromMetrics(*args)
