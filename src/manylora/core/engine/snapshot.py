"""Collects an engine's gauges and counters from its parts, and checks that these agree, for tests and soak runs.

The work depends on the requests in flight and the pages of the pool, never on the number of registered adapters:
watchdogs and scrapes ask every few seconds, and the loop makes no step meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import fields
from operator import attrgetter

from manylora.core.costs.rank_fit import StepFit
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.registry import AdapterRegistry
from manylora.core.engine.adapters.residency import TierState
from manylora.core.engine.status import ColdStartStatus, Counters, EngineStats
from manylora.core.memory import Owner, PageAllocator, PageCache
from manylora.core.plan import ARRIVING, ON_DEVICE, PlannedSequence, StepPlan
from manylora.core.scheduling import Policy, Sequence, SequenceStatus
from manylora.core.types import AdapterKey, Tier

__all__ = ["check_integrity", "take_snapshot"]

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


def check_integrity(
    *,
    sequences: Collection[Sequence],
    running: Seq[Sequence],
    num_waiting: int,
    plans: Seq[StepPlan],
    page_cache: PageCache,
    cache: AdapterCache,
    block_size: int,
) -> None:
    """Assert that memory, references and queues agree; slow.

    ``sequences`` are all requests in flight; ``running`` also has ended sequences that a step in flight still uses.
    """
    page_cache.check_integrity()
    over = [sequence for sequence in running if sequence.status is SequenceStatus.FINISHED]
    assert all(sequence.num_in_flight for sequence in over)
    assert len(sequences) == len(running) - len(over) + num_waiting
    for sequence in running:
        parts = [part for plan in plans for part in plan.sequences if part.seq_id == sequence.seq_id]
        assert sequence.num_in_flight == len(parts)
        assert sequence.num_pending == sum(part.is_sampled for part in parts)
        assert not sequence.has_kv or len(sequence.table.pages) * block_size >= sequence.num_computed
        if sequence.adapter is not None:
            placement = cache.cold.get(sequence.adapter, ON_DEVICE)
            assert sequence.placement is placement, "the sequences of an adapter read it from different places"
            state = cache.residencies[sequence.adapter].device
            assert placement is not ARRIVING or state in (TierState.LOADING, TierState.FAILED)
            assert placement is not ON_DEVICE or state is TierState.RESIDENT
            assert state is not TierState.FAILED or sequence.num_in_flight, "nothing keeps the pages of a failed load"
        for part in parts:
            assert _holds(cache, part), f"{part.adapter} is planned from {part.placement} and is not there"
    for residency in cache.residencies.values():
        assert residency.num_running or residency.version.key not in cache.cold
        assert residency.num_running or residency.device is not TierState.FAILED
        users = [sequence for sequence in (*sequences, *over) if sequence.adapter == residency.version.key]
        assert residency.num_running == sum(one.status is not SequenceStatus.WAITING for one in users)
        assert residency.num_waiting == sum(one.status is SequenceStatus.WAITING for one in users)


def _holds(cache: AdapterCache, part: PlannedSequence) -> bool:
    """Whether weights are where a step in flight reads them; missing layers may be loading, or not come.

    The executor keeps the host image of a step in flight, so the tier may drop it once the adapter is on the device.
    """
    if part.adapter is None:
        return True
    residency = cache.residencies[part.adapter]
    state = residency.host if part.placement.tier is Tier.HOST else residency.device
    if part.placement.tier is Tier.HOST and residency.device is TierState.RESIDENT:
        return True
    may_miss = part.placement.num_layers is not None
    return state is TierState.RESIDENT or (may_miss and state is not TierState.ABSENT)
