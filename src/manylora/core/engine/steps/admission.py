"""Admission: whether a waiting sequence can run now, and the place of its adapter's weights if it can.

::

    offered --> limit of adapters --> adapter on the device, or cold start --> pages for its KV --> running
                  ADAPTER_CAP         ADAPTER_LOADING, ADAPTER_NO_PAGES          NO_PAGES
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import InitVar, dataclass

from manylora.core.config import EngineConfig
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.adapters.loader import AdapterLoader
from manylora.core.engine.adapters.registry import AdapterRegistry
from manylora.core.engine.adapters.residency import Residency, TierState
from manylora.core.engine.status import Telemetry
from manylora.core.engine.steps.running import RunningSet
from manylora.core.events import AdapterAwaited, RequestAdmitted
from manylora.core.memory import Depth, PageCache, num_blocks
from manylora.core.plan import ARRIVING, IN_HOST, ON_DEVICE, Placement
from manylora.core.scheduling import Outcome, Sequence
from manylora.core.types import AdapterVersion, ColdStart

__all__ = ["Admission", "most_pages_together"]


@dataclass(eq=False)
class Admission:
    """Admits waiting sequences to the running set, one by one."""

    config: InitVar[EngineConfig]
    _running: RunningSet
    _page_cache: PageCache
    _cache: AdapterCache
    _loader: AdapterLoader
    _cold_starts: ColdStarts  # chooses how a sequence starts whose adapter is not on the device
    _registry: AdapterRegistry  # counts requests that find their adapter on the device
    _telemetry: Telemetry

    def __post_init__(self, config: EngineConfig) -> None:
        self.again_at = math.inf  # when a sequence that waits for its adapter is to be looked at again, in seconds
        self._max_loras = config.scheduler.max_loras
        self._reserves_peak = config.scheduler.reserve_output == "peak"
        self._prefix_caching = config.memory.prefix_caching
        self._block_size = config.memory.block_size

    def admit(self, sequence: Sequence, now: float, depth: Depth) -> Outcome:
        """Admit a waiting sequence if its adapter is where a step can read it and its KV has room at ``depth``."""
        if self._reserves_peak and not self._fits_at_peak(sequence):
            return Outcome.NO_PAGES
        placement, was_resident = ON_DEVICE, True
        residency: Residency | None = None
        if (version := sequence.version) is not None:
            residency = self._cache.residencies[version.key]
            most = self._max_loras
            if most is not None and self._cache.num_active >= most and not residency.num_running:
                self._cold_starts.held_up(sequence)
                return Outcome.ADAPTER_CAP
            is_resident = residency.device is TierState.RESIDENT
            if sequence.looked_at(is_resident=is_resident) and is_resident:
                self._telemetry.counters.num_adapter_hits += 1
                self._registry.note_hit(sequence.name)
            was_resident = sequence.found_resident
            if not is_resident:
                cold = self._start_cold(sequence, version, residency, now, depth)
                if isinstance(cold, Outcome):
                    return cold
                placement = cold
        shared: list[int] = []
        if self._prefix_caching:
            shared = sequence.table.match(sequence.tokens, self._page_cache.prefix, sequence.num_reusable)
        num_missing = num_blocks(sequence.num_tokens_to_hold, self._block_size) - len(shared)
        pages = self._page_cache.claim_kv(num_missing, now, depth, spare=sequence.adapter, shared=shared)
        if pages is None:
            self._cold_starts.held_up(sequence)
            return Outcome.NO_PAGES
        loaded = 0 if residency is None else residency.take_load()
        if sequence.admitted(now, shared=shared, pages=pages, placement=placement, num_loaded_pages=loaded):
            self._note_admission(sequence, now, was_resident)
        self._running.start(sequence, placement, now)
        return Outcome.ADMITTED

    def _start_cold(
        self, sequence: Sequence, version: AdapterVersion, residency: Residency, now: float, depth: Depth
    ) -> Placement | Outcome:
        """Bring up an adapter; return the place from which its sequence may run meanwhile, or why it has to wait."""
        mode = self._cold_starts.mode(sequence, residency, self._running.sequences, now)
        self._loader.ensure(version, now, depth, at_once=self._cold_starts.chains_copy(mode))
        placement = _placement(residency, mode, self._cache.cold.get(version.key))
        if placement is ARRIVING and (begins_at := self._cold_starts.begins_at(sequence)) > now:
            self.again_at = min(self.again_at, begins_at)
            placement = None
        if placement is not None:
            return placement
        if not residency.is_loading:
            self._cold_starts.held_up(sequence)
            return Outcome.ADAPTER_NO_PAGES
        self._note_wait(sequence, residency, now, depth)
        return Outcome.ADAPTER_LOADING

    def _note_admission(self, sequence: Sequence, now: float, was_resident: bool) -> None:
        """Count and report the first admission of a sequence."""
        counters, num_cached = self._telemetry.counters, sequence.num_cached
        counters.num_prompt_tokens += sequence.num_prompt_tokens
        counters.num_cached_tokens += num_cached
        waited_s, request_id = now - sequence.arrived_at, sequence.request.request_id
        self._telemetry.emit(RequestAdmitted(now, request_id, sequence.adapter, waited_s, num_cached, was_resident))

    def _note_wait(self, sequence: Sequence, residency: Residency, now: float, depth: Depth) -> None:
        """Report, once per load, that a sequence waits only for that load.

        Its pages in the prefix cache are not counted: a wait can be missed, but every reported one is real.
        """
        if sequence.awaited_load == residency.num_loads:
            return
        if num_blocks(sequence.num_tokens_to_hold, self._block_size) <= self._page_cache.num_claimable(depth):
            sequence.awaited(residency.num_loads)
            self._telemetry.emit(AdapterAwaited(now, sequence.request.request_id, residency.version.key))

    def _fits_at_peak(self, sequence: Sequence) -> bool:
        """Whether all running sequences and this one can run to their longest answers, their adapters beside them."""
        if not self._running.sequences:
            return True  # without others it fits, or it would have been refused on arrival
        together = [*self._running.sequences, sequence]
        adapters = {one.adapter: one.num_adapter_pages for one in together}
        # The last token needs no KV.
        lengths = (
            (one.num_tokens + one.state_tokens, max(0, one.max_tokens - one.num_output_tokens - 1)) for one in together
        )
        num_pages = self._page_cache.allocator.num_pages - sum(adapters.values())
        return most_pages_together(lengths, self._block_size) <= num_pages


def most_pages_together(sequences: Iterable[tuple[int, int]], block_size: int) -> int:
    """Return an upper bound on the pages that sequences hold at once until the last has ended.

    All generate one token a step, so the most is held just before one of them ends. At that time the sequences that
    have as many tokens left, or more, have all grown by as many. Each may leave most of its last page empty.
    ``sequences`` has the tokens that each holds, and may still generate.

    Source: S-LoRA's public request queue, which counts tokens.
    """
    held = most = 0
    for count, (num_left, num_held) in enumerate(sorted(((left, now) for now, left in sequences), reverse=True), 1):
        held += num_held + block_size - 1
        most = max(most, (held + count * num_left) // block_size)
    return most


def _placement(residency: Residency, mode: ColdStart, others: Placement | None) -> Placement | None:
    """Return the placement from which a cold sequence may run now, ``None`` if it has to wait.

    The copy to the device must be in flight: without pages for its adapter, its memory would be outside the page
    cache's count. All sequences of an adapter share a placement, ``others`` if any run: a step reads an adapter
    from one place.
    """
    if mode is ColdStart.WAIT or residency.device is not TierState.LOADING:
        return None
    if others is not None:
        return others
    if mode is ColdStart.LAYERS:
        return ARRIVING
    return IN_HOST if residency.host is TierState.RESIDENT else None
