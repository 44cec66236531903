"""Collects an engine's gauges and counters from its parts.

The work depends on the requests in flight and the pages of the pool, never on the number of registered adapters:
watchdogs and scrapes ask every few seconds, and the loop makes no step meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from operator import attrgetter

from manylora.core.costs.rank_fit import StepFit
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.registry import AdapterRegistry
from manylora.core.engine.adapters.residency import TierState
from manylora.core.engine.status import ColdStartStatus, Counters, EngineStats
from manylora.core.memory import Owner, PageAllocator
from manylora.core.scheduling import Policy, Sequence, SequenceStatus
from manylora.core.types import AdapterKey

__all__ = ["take_snapshot"]

_COUNTED = tuple(field.name for field in fields(Counters))
_counts = attrgetter(*_COUNTED)


def take_snapshot(
    *,
    sequences: Collection[Sequence],
    num_running: int,
    policy: Policy,
    allocator: PageAllocator,
    registry: AdapterRegistry,
    cache: AdapterCache,
    num_loading: int,
    counters: Counters,
    cold_starts: tuple[ColdStartStatus, ...],
    fits: tuple[StepFit, ...],
    base_weights: tuple[str, ...],
) -> EngineStats:
    """Return gauges and counters of the engine with these parts and figures.

    ``sequences`` are all requests in flight; ``num_running`` includes ended requests that a step in flight still uses.
    """
    in_pages = [cache.residencies[key] for key in cache.in_pages]
    resident = [one for one in in_pages if one.device is TierState.RESIDENT]
    num_on_both = sum([one.host is TierState.RESIDENT for one in resident])
    num_host, num_known = len(cache.host), len(cache.residencies)

    def names(keys: Iterable[AdapterKey]) -> tuple[str, ...]:
        return tuple(sorted(name for key in dict.fromkeys(keys) for name in registry.shown_names_of(key)))

    waiting = (one.adapter for one in sequences if one.status is SequenceStatus.WAITING and one.adapter is not None)
    return EngineStats(
        num_running=num_running,
        num_waiting=len(policy),
        num_pages=allocator.num_pages,
        num_free_pages=allocator.num_free,
        num_kv_pages=allocator.count(Owner.KV),
        num_prefix_pages=allocator.count(Owner.PREFIX),
        num_adapter_pages=allocator.count(Owner.ADAPTER),
        num_registered=len(registry),
        num_resident=len(resident),
        num_loading=num_loading,
        num_active=cache.num_active,
        num_failed=len(cache.failed),
        num_only_host=num_host - num_on_both,
        num_only_disk=num_known - len(resident) - num_host + num_on_both,
        num_host=num_host,
        host_bytes=cache.host.num_bytes,
        running_adapters=names(one.version.key for one in in_pages if one.num_running),
        waiting_adapters=names(waiting),
        resident_adapters=names(one.version.key for one in resident),
        queues=policy.queues(),
        cold_starts=cold_starts,
        fits=fits,
        base_weights=base_weights,
        **dict(zip(_COUNTED, _counts(counters), strict=True)),
    )
