"""The loader: moves versions up the tiers for sequences that need them, asynchronously on every hop.

::

    ensure(version)   device resident   -> nothing to do
                      host resident     -> claim pages, start the copy
                      on disk           -> start the read; with ``at_once`` the copy too, which follows it by layers

A link serves loads first in, first out. A copy may be *chained* to the read of the same version: it follows the read
layer by layer, and leaves the link to others while it waits for the next. From the loads in flight and the durations of
those that have ended follow the times of loads to come (``LoadsInFlight.route``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from manylora.core.config import AdapterConfig
from manylora.core.costs.cold_start import Route
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.residency import HostCopies, Residencies, Residency, TierState
from manylora.core.engine.status import Telemetry
from manylora.core.events import AdapterLoaded, AdapterLoadStarted
from manylora.core.memory import Depth, PageCache, ReloadCosts, make_eviction_policy
from manylora.core.plan import ARRIVING, AdapterLoad, LoadResult
from manylora.core.ports import Executor, Work
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["AdapterLoader", "LoadInFlight", "LoadsEnded", "LoadsInFlight", "make_loader"]

CHAINED_COPY = 2.0
"""Duration of a chained copy, in durations of its read, from which on the link and not the disk held it up."""

LATE = 1.25  # least duration of a load in flight, in durations so far: one that is late is likely to be late for longer


@dataclass(slots=True, eq=False)
class LoadInFlight:
    """A load in flight; ``follows`` is the read that a copy is chained to."""

    version: AdapterVersion
    tier: Tier
    work: Work
    started_at: float
    follows: LoadInFlight | None = None
    ended_at: float | None = None

    def needs_link_from(self, begins_at: float, now: float) -> float:
        """Return the time from which only the link decides its end, if it had its turn at ``begins_at``.

        Until its read has ended, a chained copy takes no more of the link than its own bytes, and may take those last.
        """
        if self.follows is None:
            return begins_at
        return max(begins_at, now if self.follows.ended_at is None else self.follows.ended_at)

    def is_held_up(self, took_s: float) -> bool:
        """Whether the read that a copy followed, and not the link, decided how long it took."""
        read = self.follows
        if read is None:
            return False
        return read.ended_at is None or took_s < CHAINED_COPY * (read.ended_at - read.started_at)


class LoadsInFlight:
    """The loads in flight, and the durations learnt from those that ended. Times are in seconds."""

    def __init__(self, costs: ReloadCosts) -> None:
        self._costs = costs
        self.in_flight: list[LoadInFlight] = []
        self._link_free_at = {Tier.HOST: 0.0, Tier.DEVICE: 0.0}

    def to(self, tier: Tier) -> list[AdapterVersion]:
        """Return the versions that are loading to ``tier``."""
        return [load.version for load in self.in_flight if load.tier is tier]

    def started(self, version: AdapterVersion, tier: Tier, work: Work, now: float) -> None:
        """Add a load that was just started."""
        reads = [load for load in self.in_flight if load.tier is Tier.HOST and load.version.key == version.key]
        self.in_flight.append(LoadInFlight(version, tier, work, now, reads[0] if reads else None))

    def ended(self, load: LoadInFlight, now: float, *, ok: bool) -> None:
        """Remove a load, and learn its own duration, without the wait for its link."""
        self.in_flight.remove(load)
        took_s = now - max(load.started_at, self._link_free_at[load.tier])
        self._link_free_at[load.tier] = load.ended_at = now
        if ok and load.tier is Tier.HOST:
            self._costs.read.observe(load.version.disk_bytes, took_s)
        elif ok and not load.is_held_up(took_s):
            self._costs.copy.observe(load.version.host_bytes, took_s)

    def route(self, residency: Residency, now: float) -> Route:
        """Return the predicted times of the hops that a version has yet to take, behind the loads in flight."""
        is_in_host = residency.host is TierState.RESIDENT
        read_begins_s, read_s = (0.0, 0.0) if is_in_host else self._hop(residency.version, Tier.HOST, now)
        copy_begins_s, copy_s = self._hop(residency.version, Tier.DEVICE, now)
        return Route(
            read_begins_s=read_begins_s,
            read_s=read_s,
            copy_begins_s=copy_begins_s,
            copy_s=copy_s,
            is_chained=not is_in_host and residency.device is TierState.LOADING,
            is_whole=residency.version.is_whole,
        )

    def _hop(self, version: AdapterVersion, tier: Tier, now: float) -> tuple[float, float]:
        """Return the begin of a load, from now (negative if it has begun), and its duration, in seconds."""
        free_at = self._link_free_at[tier]
        for load in self.in_flight:
            if load.tier is tier:
                begins_at, own_s = max(load.started_at, free_at), self._seconds(load.version, tier)
                if load.version.key == version.key:
                    return begins_at - now, max(own_s, LATE * (now - begins_at))
                needed_from = load.needs_link_from(begins_at, now)
                free_at = needed_from + max(own_s, LATE * (now - needed_from))
        return max(0.0, free_at - now), self._seconds(version, tier)

    def _seconds(self, version: AdapterVersion, tier: Tier) -> float:
        if tier is Tier.HOST:
            return self._costs.read.seconds(version.disk_bytes)
        return self._costs.copy.seconds(version.host_bytes)


class LoadsEnded(NamedTuple):
    """The outcome of the loads that were complete at one time."""

    arrived: list[AdapterKey]  # versions that reached the device while sequences ran on them from elsewhere
    failed: list[tuple[AdapterKey, str]]  # versions that do not reach the device, with the reason


class AdapterLoader:
    """Starts loads, and takes in those that are complete. Times are in seconds."""

    def __init__(
        self, cache: AdapterCache, page_cache: PageCache, executor: Executor, costs: ReloadCosts, telemetry: Telemetry
    ) -> None:
        self.loads = LoadsInFlight(costs)
        self._cache = cache
        self._page_cache = page_cache
        self._executor = executor
        self._telemetry = telemetry
        self._warming: dict[AdapterKey, None] = {}
        self._read_ahead: dict[AdapterKey, None] = {}  # reads in flight for no request

    def next_event_at(self) -> float:
        """Return the time at which the next load completes; infinite if unknown."""
        return min([load.work.ready_at for load in self.loads.in_flight], default=math.inf)

    def ensure(self, version: AdapterVersion, now: float, depth: Depth, *, at_once: bool = False) -> Residency:
        """Start the next load of a version towards the device, as far as ``depth`` allows; return its state.

        ``WANTED`` may claim pages of adapters that waiting requests use, and exceed the host limit: it is for the
        sequence that is first in line, so that it always makes progress. ``at_once`` starts the copy to the device as
        well while the files are still being read.
        """
        key = version.key
        residency = self._cache.residencies[key]
        if residency.device is not TierState.ABSENT:
            return residency
        version = residency.version  # which may know more of its content
        if residency.host is TierState.ABSENT:
            if depth is Depth.IDLE and not self._cache.host.has_room(version, self.loads.to(Tier.HOST)):
                return residency
            self._start(residency, AdapterLoad(version=version, tier=Tier.HOST, is_urgent=at_once), now)
            if self._cache.host.is_by_last_run:  # now, before the next request of this step is looked at
                self._cache.trim_host(now, self.loads.to(Tier.HOST))
        if residency.host is TierState.RESIDENT or at_once:
            pages = self._page_cache.claim_adapter(key, version.num_pages, now, depth, tenant=residency.tenant)
            if pages is not None:
                if residency.host is TierState.RESIDENT:
                    self._cache.host.use(key)
                self._start(residency, AdapterLoad(version=version, tier=Tier.DEVICE, pages=pages), now)
        return residency

    def warm(self, version: AdapterVersion, now: float) -> Residency:
        """Load a version to the device before any sequence waits for it."""
        residency = self.ensure(version, now, Depth.IDLE)
        if residency.is_loading:
            residency.is_warming = True
            self._warming[version.key] = None
        return residency

    def read_ahead(self, version: AdapterVersion, now: float) -> None:
        """Read an adapter before any request needs it; until then its image is the first to leave the host tier."""
        if self.ensure(version, now, Depth.IDLE).is_loading:
            self._read_ahead[version.key] = None

    def poll(self, now: float) -> LoadsEnded:
        """Take in completed loads."""
        ended = LoadsEnded([], [])
        for load in list(self.loads.in_flight):
            result = load.work.poll(now)
            if result is None:
                continue
            assert isinstance(result, LoadResult)
            residency = self._cache.residencies[load.version.key]
            if self._finish(load, residency, result, now):
                ended.arrived.append(load.version.key)
            # A failed read fails the copy that follows it, unless that had all it needed: the copy's result decides.
            is_outcome = load.tier is Tier.DEVICE or residency.device is TierState.ABSENT
            if result.error is not None and is_outcome:
                ended.failed.append((load.version.key, result.error))
        for key in list(self._warming):
            known = self._cache.residencies.get(key)
            if known is None or not known.is_warming or not self.warm(known.version, now).is_loading:
                self._stop_warming(key)
        return ended

    def _start(self, residency: Residency, load: AdapterLoad, now: float) -> None:
        residency.begin(load.tier)
        self.loads.started(load.version, load.tier, self._executor.load_adapter(load, now), now)
        num_bytes = load.version.disk_bytes if load.tier is Tier.HOST else load.version.host_bytes
        self._telemetry.emit(AdapterLoadStarted(now, load.version.key, load.tier, num_bytes))

    def _finish(self, load: LoadInFlight, residency: Residency, result: LoadResult, now: float) -> bool:
        """Take in a completed load; return whether sequences have run on the version from elsewhere than its pages."""
        key, ok, has_arrived = load.version.key, result.error is None, False
        is_used = load.tier is Tier.DEVICE and self._cache.cold.get(key) is ARRIVING
        residency.end(load.tier, ok=ok, is_used=is_used)
        self.loads.ended(load, now, ok=ok)
        if load.tier is Tier.HOST:
            self._finish_read(load, residency, result, now)
        elif ok:
            self._telemetry.counters.num_loads += 1
            # The claim left its pages held; now they get the class of its references.
            self._cache.refresh(key, now)
            has_arrived = self._cache.cold.pop(key, None) is not None
            if not has_arrived:  # else steps that are planned may read the host copy: it stays until none runs
                self._cache.drop_second_copy(residency, now)
        elif not is_used:  # else its pages are released with the last step that uses them
            # Sequences that run from the image go on from it, to their end if need be: they lack nothing, and a copy
            # that failed would take pages from others to fail again. The next request for the adapter starts another.
            self._cache.abandon(key)
        if not ok:
            self._stop_warming(key)
        self._telemetry.emit(AdapterLoaded(now, key, load.tier, now - load.started_at, result.error))
        self._cache.free_if_over(key, now)
        return has_arrived

    def _finish_read(self, load: LoadInFlight, residency: Residency, result: LoadResult, now: float) -> None:
        key, cache = load.version.key, self._cache
        is_ahead = key in self._read_ahead
        self._read_ahead.pop(key, None)
        cache.note_read(residency, result.error)
        if result.error is not None:
            # Meanwhile, the same content may have been read for a registration that was refused.
            self._executor.drop_adapter(key, Tier.HOST)
            return
        self._telemetry.counters.num_disk_loads += 1
        if result.layer_digests:
            residency.learnt(result.layer_digests)
        cache.host.add(load.version, is_first_to_go=is_ahead and not residency.is_referenced)
        cache.trim_host(now)

    def _stop_warming(self, key: AdapterKey) -> None:
        self._warming.pop(key, None)
        if (residency := self._cache.residencies.get(key)) is not None:
            residency.is_warming = False


def make_loader(
    executor: Executor,
    config: AdapterConfig,
    costs: ReloadCosts,
    telemetry: Telemetry,
    *,
    num_pages: int,
    block_size: int,
    host_bytes: int,
    is_pinned: Callable[[AdapterKey], bool],
) -> tuple[PageCache, AdapterCache, AdapterLoader]:
    """Make a pool of pages, the cache of the adapters in it, and the loader that fills it.

    The loader learns durations in ``costs``. ``host_bytes`` bounds the host tier if the configuration does not; a
    version for which ``is_pinned`` is true stays on the device.
    """
    residencies = Residencies(executor, telemetry)
    page_cache = PageCache(
        num_pages,
        block_size,
        policy=make_eviction_policy(config.eviction, costs, config.eviction_options),
        on_adapter_dropped=residencies.evicted,
        on_prefix_dropped=telemetry.prefix_dropped,
    )
    host = HostCopies(residencies, config, host_bytes if config.host_bytes is None else config.host_bytes)
    cache = AdapterCache(residencies, host, page_cache, executor, costs, is_pinned)
    return page_cache, cache, AdapterLoader(cache, page_cache, executor, costs, telemetry)
