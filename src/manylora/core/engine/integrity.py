"""Invariants across the parts of an engine, for tests and soak runs."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.residency import TierState
from manylora.core.memory import PageCache
from manylora.core.plan import ARRIVING, ON_DEVICE, PlannedSequence, StepPlan
from manylora.core.scheduling import Sequence, SequenceStatus
from manylora.core.types import Tier

__all__ = ["check_integrity"]


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
