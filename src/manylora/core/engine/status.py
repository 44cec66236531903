"""Snapshots of the engine for status pages, clients and metrics: plain data, made on request."""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.costs.rank_fit import StepFit
from manylora.core.scheduling import QueueStatus
from manylora.core.types import AdapterVersion, Tier

__all__ = ["AdapterStatus", "ColdStartStatus", "EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """One registered name.

    Args:
        generation: 1 when first loaded, one more with every replacement in place.
        tier: Highest tier its weights are in.
        state: ``idle``, ``active``, ``loading``, ``failed`` (its weights cannot be read) or ``evicting`` (waiting for
            its last request to end).
        num_requests: Requests for it since it was loaded.
        num_hits: Of these, the requests that found it on the device.
        last_used_s: Seconds since its last use, ``None`` if never used.
        price: Value of keeping it on the device while it idles there, in seconds of reloading saved per second and
            page; ``None`` where it is in use, in another tier, or the eviction policy has another unit.
        error: The reason why its weights could not be read, if they could not.
    """

    name: str
    version: AdapterVersion
    generation: int
    tier: Tier
    state: str
    is_pinned: bool
    num_running: int
    num_waiting: int
    num_requests: int
    num_hits: int
    last_used_s: float | None
    price: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartStatus:
    """Cold starts in one mode, from the choice of the mode to the first token.

    Args:
        mode: ``wait``, ``assist`` or ``layers``.
        num_starts: Requests that got their first token.
        num_measured: Requests that waited for nothing but their adapter; all figures below are of these.
        expected_s: Sum of the predicted times to first token.
        actual_s: Sum of the actual times.
        error_s: Mean absolute error of the predictions.
        relative_error: Mean of the errors relative to the actual times.
        correction: Factor on the predicted delay, from predictions that were wrong; 1 at the start.
    """

    mode: str
    num_starts: int
    num_measured: int
    expected_s: float
    actual_s: float
    error_s: float
    relative_error: float
    correction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and counters of one engine; counters are since start.

    Args:
        num_kv_pages: Pages of running sequences (shared prefix pages in use count here).
        num_prefix_pages: Pages of idle prefix blocks.
        num_adapter_pages: Pages of adapters on the device or loading.
        num_registered: Registered adapter names.
        num_resident: Adapter versions on the device.
        num_loading: Versions loading to the device.
        num_active: Versions that a running sequence uses.
        num_host: Versions in the host tier.
        running_adapters: Names of adapters with running requests, sorted.
        waiting_adapters: Names of adapters with waiting requests, sorted.
        num_loads: Host to device copies completed.
        num_disk_loads: Disk to host reads completed by the engine.
        num_evictions: Adapters dropped from the device for room.
        num_prefix_evictions: Prefix pages dropped for room.
        num_preemptions: Sequences pre-empted because memory was short.
        num_prompt_tokens: Prompt tokens of admitted requests.
        num_cached_tokens: Of these, the tokens that the prefix cache held.
        num_adapter_requests: Requests for an adapter.
        num_adapter_hits: Of these, the requests that found it on the device when it was first looked up.
        num_squashes: Sequences pre-empted for one that they had passed.
        num_prefetches: Loads started before the admission of their sequences.
        num_failed: Versions whose weights could not be read.
        num_only_host: Versions whose highest tier is the host.
        num_only_disk: Versions that are only on disk.
        num_answers: Requests that ended with a stop token or at their limit.
        num_answer_tokens: Their generated tokens.
        resident_adapters: Names of adapters on the device, sorted.
        fits: Step-time models fitted to this engine's steps; none before enough steps.
        queues: The policy's queues, smallest requests first.
        base_weights: How the base's weights are kept and multiplied: a line for each kind, the largest first.
        cold_starts: Cold starts by mode, of the modes that the executor can do; empty if it can only wait.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_kv_pages: int
    num_prefix_pages: int
    num_adapter_pages: int
    num_registered: int
    num_resident: int
    num_loading: int
    num_active: int
    num_host: int
    host_bytes: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    num_loads: int
    num_disk_loads: int
    num_evictions: int
    num_prefix_evictions: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_adapter_requests: int
    num_adapter_hits: int
    num_squashes: int = 0
    num_prefetches: int = 0
    num_failed: int = 0
    num_only_host: int = 0
    num_only_disk: int = 0
    num_answers: int = 0
    num_answer_tokens: int = 0
    resident_adapters: tuple[str, ...] = ()
    fits: tuple[StepFit, ...] = ()
    queues: tuple[QueueStatus, ...] = ()
    cold_starts: tuple[ColdStartStatus, ...] = ()
    base_weights: tuple[str, ...] = ()
