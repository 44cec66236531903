"""Collects an engine's gauges and counters from its parts.

The work depends on the requests in flight and the pages of the pool, never on the number of registered adapters:
watchdogs and scrapes ask every few seconds, and the loop makes no step meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from manylora.core.adapters.registry import AdapterRegistry
from manylora.core.adapters.residency import TierState
from manylora.core.costs.rank_fit import StepFit
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.adapters.prefetch import Prefetcher
from manylora.core.engine.status import Counters, EngineStats
from manylora.core.engine.steps.running import RunningSet
from manylora.core.memory import Owner, PageAllocator
from manylora.core.scheduling import Policy, Sequence, SequenceStatus
from manylora.core.types import AdapterKey, Tier

__all__ = ["take_snapshot"]


def take_snapshot(
    *,
    running: RunningSet,
    policy: Policy,
    allocator: PageAllocator,
    registry: AdapterRegistry,
    cache: AdapterCache,
    sequences: Collection[Sequence],
    prefetcher: Prefetcher,
    cold_starts: ColdStarts,
    counters: Counters,
    fits: tuple[StepFit, ...],
) -> EngineStats:
    """Return gauges and counters of the engine with these parts."""
    in_pages = [cache.residency(key) for key in cache.in_pages()]
    num_resident = sum([one.device is TierState.RESIDENT for one in in_pages])
    num_on_both = sum([one.device is TierState.RESIDENT and one.host is TierState.RESIDENT for one in in_pages])

    def names(keys: Iterable[AdapterKey]) -> tuple[str, ...]:
        return tuple(sorted(name for key in dict.fromkeys(keys) for name in registry.names_of(key)))

    waiting = (one.adapter for one in sequences if one.status is SequenceStatus.WAITING and one.adapter is not None)
    return EngineStats(
        num_running=len(running),
        num_waiting=len(policy),
        num_pages=allocator.num_pages,
        num_free_pages=allocator.num_free,
        num_kv_pages=allocator.count(Owner.KV),
        num_prefix_pages=allocator.count(Owner.PREFIX),
        num_adapter_pages=allocator.count(Owner.ADAPTER),
        num_registered=len(registry),
        num_resident=num_resident,
        num_loading=cache.num_loading(Tier.DEVICE),
        num_active=cache.num_active,
        num_failed=len(cache.failed),
        num_only_host=cache.num_host - num_on_both,
        num_only_disk=cache.num_known - num_resident - cache.num_host + num_on_both,
        num_host=cache.num_host,
        host_bytes=cache.host_bytes,
        running_adapters=names(one.version.key for one in in_pages if one.num_running),
        waiting_adapters=names(waiting),
        num_loads=cache.num_loads,
        num_disk_loads=cache.num_disk_loads,
        num_evictions=cache.num_evictions,
        num_prefix_evictions=counters.prefix_evictions,
        num_preemptions=counters.preemptions,
        num_squashes=counters.squashes,
        num_prefetches=prefetcher.num_prefetches,
        queues=policy.queues(),
        cold_starts=cold_starts.statuses(),
        num_steps=counters.steps,
        num_prompt_tokens=counters.prompt_tokens,
        num_cached_tokens=counters.cached_tokens,
        num_generated_tokens=counters.generated_tokens,
        num_adapter_requests=counters.adapter_requests,
        num_adapter_hits=counters.adapter_hits,
        num_answers=counters.answers,
        num_answer_tokens=counters.answer_tokens,
        resident_adapters=names(one.version.key for one in in_pages if one.device is TierState.RESIDENT),
        fits=fits,
    )
