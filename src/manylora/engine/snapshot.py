"""Collects an engine's gauges and counters from its parts."""

from __future__ import annotations

from manylora.adapters.registry import AdapterRegistry
from manylora.adapters.residency import Residency, TierState
from manylora.costs.rank_fit import StepFit
from manylora.engine.adapters.cache import AdapterCache
from manylora.engine.adapters.prefetch import Prefetcher
from manylora.engine.status import Counters, EngineStats
from manylora.engine.steps.running import RunningSet
from manylora.memory import Owner, PageAllocator
from manylora.scheduling import Policy

__all__ = ["take_snapshot"]


def take_snapshot(
    *,
    running: RunningSet,
    policy: Policy,
    allocator: PageAllocator,
    registry: AdapterRegistry,
    cache: AdapterCache,
    prefetcher: Prefetcher,
    counters: Counters,
    fits: tuple[StepFit, ...],
) -> EngineStats:
    """Return gauges and counters of the engine with these parts."""
    residencies = cache.residencies()

    def names(residencies: list[Residency]) -> tuple[str, ...]:
        return tuple(sorted(name for one in residencies for name in registry.names_of(one.version.key)))

    return EngineStats(
        num_running=len(running),
        num_waiting=len(policy),
        num_pages=allocator.num_pages,
        num_free_pages=allocator.num_free,
        num_kv_pages=allocator.count(Owner.KV),
        num_prefix_pages=allocator.count(Owner.PREFIX),
        num_adapter_pages=allocator.count(Owner.ADAPTER),
        num_registered=len(registry),
        num_resident=sum(one.device is TierState.RESIDENT for one in residencies),
        num_loading=sum(one.device is TierState.LOADING for one in residencies),
        num_active=cache.num_active,
        num_host=cache.num_host,
        host_bytes=cache.host_bytes,
        running_adapters=names([one for one in residencies if one.num_running]),
        waiting_adapters=names([one for one in residencies if one.num_waiting]),
        num_loads=cache.num_loads,
        num_disk_loads=cache.num_disk_loads,
        num_evictions=cache.num_evictions,
        num_prefix_evictions=counters.prefix_evictions,
        num_preemptions=counters.preemptions,
        num_squashes=counters.squashes,
        num_prefetches=prefetcher.num_prefetches,
        queues=policy.queues(),
        num_steps=counters.steps,
        num_prompt_tokens=counters.prompt_tokens,
        num_cached_tokens=counters.cached_tokens,
        num_generated_tokens=counters.generated_tokens,
        num_adapter_requests=counters.adapter_requests,
        num_adapter_hits=counters.adapter_hits,
        num_answers=counters.answers,
        num_answer_tokens=counters.answer_tokens,
        resident_adapters=names([one for one in residencies if one.device is TierState.RESIDENT]),
        fits=fits,
    )
