"""The adapter cache: moves versions up the tiers for sequences that need them, and keeps idle ones in spare pages.

It has no size of its own on the device: pages come from the shared pool, and an idle adapter stays until its pages are
needed. Loads are asynchronous on every hop.

::

    ensure(version)   device resident   -> nothing to do
                      host resident     -> claim pages, start the copy
                      on disk           -> start the read; with ``at_once`` the copy too, which follows it by layers

Source: Chameleon, section 4.2; S-LoRA, section 5.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from manylora.core.adapters.residency import Residency, TierState
from manylora.core.config import DEFAULT_HOST_BYTES, AdapterConfig
from manylora.core.costs.cold_start import Route
from manylora.core.engine.adapters.loads import LoadInFlight, LoadsInFlight
from manylora.core.events import AdapterEvicted, AdapterLoaded, AdapterLoadStarted, EventSink
from manylora.core.memory import Depth, IdleItem, PageCache, ReloadCosts
from manylora.core.plan import ARRIVING, IN_HOST, ON_DEVICE, AdapterLoad, LoadResult, Placement
from manylora.core.ports import Executor
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["AdapterCache"]


class AdapterCache:
    """Tracks every version that a name or a sequence refers to.

    ``cold`` has the placement of each version that running sequences do not read from complete pages.

    Args:
        config: Limits of the host tier.
        costs: Learns the durations of loads.
        on_arrived: Called with a version that reaches the device while sequences run on it.
    """

    def __init__(
        self,
        *,
        page_cache: PageCache,
        executor: Executor,
        config: AdapterConfig,
        costs: ReloadCosts,
        is_pinned: Callable[[AdapterKey], bool],
        emit: EventSink,
        on_arrived: Callable[[AdapterKey], None] = lambda key: None,
    ) -> None:
        self._page_cache = page_cache
        self._executor = executor
        self._config = config
        self._host_limit = DEFAULT_HOST_BYTES if config.host_bytes is None else config.host_bytes
        self._costs = costs
        self._is_pinned = is_pinned
        self._emit = emit
        self._on_arrived = on_arrived
        self._residencies: dict[AdapterKey, Residency] = {}
        self._loads = LoadsInFlight(costs)
        self._host: OrderedDict[AdapterKey, int] = OrderedDict()  # bytes, least recently used first
        self._warming: dict[AdapterKey, None] = {}
        self._read_ahead: dict[AdapterKey, bool] = {}  # reads in flight for no request
        self._failed: dict[AdapterKey, None] = {}
        self.cold: dict[AdapterKey, Placement] = {}
        self.num_active = 0  # versions that a running sequence uses
        self.host_bytes = 0
        self.num_loads = 0
        self.num_disk_loads = 0
        self.num_evictions = 0

    # -- placement ---------------------------------------------------------------------------------------------------

    def residency(self, key: AdapterKey) -> Residency:
        """Return the state of a known version."""
        return self._residencies[key]

    def residencies(self) -> list[Residency]:
        """Return the state of every known version."""
        return list(self._residencies.values())

    def knows(self, key: AdapterKey) -> bool:
        """Whether any name or sequence refers to a version."""
        return key in self._residencies

    def reload_s(self, key: AdapterKey) -> float:
        """Return the time in seconds to load a version to the device from its present tier."""
        version = self._residencies[key].version
        item = IdleItem(key, version.num_pages, 0.0, version.host_bytes, self._read_bytes(key))
        return self._costs.reload_s(item)

    @property
    def num_host(self) -> int:
        """Versions in the host tier."""
        return len(self._host)

    @property
    def num_known(self) -> int:
        """Versions that a name or a sequence refers to."""
        return len(self._residencies)

    @property
    def failed(self) -> Collection[AdapterKey]:
        """Versions whose last read failed."""
        return self._failed.keys()

    def in_pages(self) -> Collection[AdapterKey]:
        """Return the versions on the device, or loading to it."""
        return self._page_cache.adapters()

    def num_loading(self, tier: Tier) -> int:
        """Return the number of loads to ``tier`` in flight."""
        return sum([load.tier is tier for load in self._loads])

    def recent_host(self) -> Iterator[AdapterKey]:
        """Return the versions in the host tier, the most recently used first."""
        return reversed(self._host)

    def has_spare_host(self, version: AdapterVersion) -> bool:
        """Whether a version fits into the host tier and no copy must be dropped for it."""
        return not self._is_over(self.host_bytes + version.host_bytes, len(self._host) + 1)

    @property
    def has_loads(self) -> bool:
        """Whether any load is in flight."""
        return bool(self._loads)

    def next_event_at(self) -> float:
        """Return the time at which the next load completes; infinite if unknown."""
        return self._loads.next_event_at()

    # -- registration ------------------------------------------------------------------------------------------------

    def add(self, version: AdapterVersion, now: float, tier: Tier = Tier.HOST) -> None:
        """Add a version whose weights the executor holds in the host tier, or that is on disk and was not read yet."""
        residency = self._residencies.setdefault(version.key, Residency(version))
        residency.is_retired = False
        if tier is Tier.HOST:
            self._failed.pop(version.key, None)
            residency.error = None
        if tier is Tier.HOST and residency.host is TierState.ABSENT:
            residency.begin(Tier.HOST)
            residency.end(Tier.HOST, ok=True)
            self._host[version.key] = version.host_bytes
            self.host_bytes += version.host_bytes
            self.refresh(version.key, now)
            self._trim_host(now)

    def price(self, key: AdapterKey, now: float) -> float | None:
        """Return the value of keeping a version on the device, if it is idle there and the eviction policy has one."""
        return self._page_cache.adapter_price(key, now)

    def refuse(self, version: AdapterVersion) -> None:
        """Drop the host copy of a version that was read and then not registered."""
        residency = self._residencies.get(version.key)
        if residency is None or residency.host is TierState.ABSENT:
            self._executor.drop_adapter(version.key, Tier.HOST)

    def retire(self, key: AdapterKey, now: float) -> None:
        """Free a version once nothing refers to it: its last name is gone."""
        self._residencies[key].is_retired = True
        self._warming.pop(key, None)
        self.refresh(key, now)  # it may have been pinned by that name
        self._free_if_over(key, now)

    # -- references --------------------------------------------------------------------------------------------------

    def ask(self, key: AdapterKey, now: float) -> None:
        """Count a request for it that arrived and waits."""
        self._page_cache.adapter_used(key, now)
        self.want(key, now)

    def want(self, key: AdapterKey, now: float) -> None:
        """Count a waiting sequence; its pages are evicted after idle ones."""
        self._residencies[key].num_waiting += 1
        self.refresh(key, now)

    def unwant(self, key: AdapterKey, now: float) -> None:
        """Count a waiting sequence out: it was admitted, or ended."""
        residency = self._residencies[key]
        assert residency.num_waiting > 0
        residency.num_waiting -= 1
        self._let_go(key, now)

    def hold(self, key: AdapterKey, now: float, placement: Placement = ON_DEVICE) -> None:
        """Count a sequence that starts to run on it, from the same placement as the others that do."""
        residency = self._residencies[key]
        if placement is not ON_DEVICE:
            assert self.cold.get(key, placement) is placement
            self.cold[key] = placement
            if placement is IN_HOST:
                self._host.move_to_end(key)
        self.num_active += residency.num_running == 0
        residency.num_running += 1
        residency.last_used_at = now
        self.refresh(key, now)

    def release(self, key: AdapterKey, now: float) -> None:
        """Count a running sequence out: it ended, or was pre-empted."""
        residency = self._residencies[key]
        assert residency.num_running > 0
        residency.num_running -= 1
        if not residency.num_running:
            self.num_active -= 1
            self.cold.pop(key, None)
            if residency.device is TierState.FAILED:
                self._give_up(key)
                residency.cleared()
            self._drop_second_copy(residency, now)
        residency.last_used_at = now
        self._let_go(key, now)

    def _let_go(self, key: AdapterKey, now: float) -> None:
        """Handle a lost reference: the version may become idle, and is dropped if the policy keeps nothing idle."""
        self.refresh(key, now)
        residency = self._residencies[key]
        is_idle = residency.device is TierState.RESIDENT and not residency.is_referenced and not self._is_pinned(key)
        if is_idle and not self._page_cache.keeps_idle_adapters:
            self._page_cache.release_adapter(key)
            self.on_dropped(key, now)
        self._free_if_over(key, now)

    def refresh(self, key: AdapterKey, now: float) -> None:
        """Set the eviction class of its pages by its references and pins."""
        residency = self._residencies[key]
        if residency.device is not TierState.RESIDENT:
            return
        if residency.num_running or self._is_pinned(key):
            depth = None
        elif residency.num_waiting:
            depth = Depth.WANTED
        else:
            depth = Depth.IDLE
        self._page_cache.set_adapter_depth(key, depth, now, read_bytes=self._read_bytes(key))

    def _read_bytes(self, key: AdapterKey) -> int:
        """Return the bytes to be read from disk before the version can be copied to the device."""
        residency = self._residencies[key]
        return 0 if residency.host is TierState.RESIDENT else residency.version.disk_bytes

    # -- loads -------------------------------------------------------------------------------------------------------

    def ensure(self, version: AdapterVersion, now: float, depth: Depth, *, at_once: bool = False) -> Residency:
        """Start the next load of a version towards the device, as far as ``depth`` allows; return its state.

        Args:
            version: The version.
            now: In seconds.
            depth: ``WANTED`` may claim pages of adapters that waiting requests use, and exceed the host limit: it is
                for the sequence that is first in line, so that it always makes progress.
            at_once: Start the copy to the device as well while the files are still being read.
        """
        key = version.key
        residency = self._residencies[key]
        if residency.device is not TierState.ABSENT:
            return residency
        version = residency.version  # which may know more of its content
        if residency.host is TierState.ABSENT:
            if depth is Depth.IDLE and not self._has_host_room(version):
                return residency
            self._start(AdapterLoad(version=version, tier=Tier.HOST, is_urgent=at_once), now)
        if residency.host is TierState.RESIDENT or at_once:
            pages = self._page_cache.claim_adapter(key, version.num_pages, now, depth)
            if pages is not None:
                if residency.host is TierState.RESIDENT:
                    self._host.move_to_end(key)
                self._start(AdapterLoad(version=version, tier=Tier.DEVICE, pages=pages), now)
        return residency

    def warm(self, version: AdapterVersion, now: float) -> Residency:
        """Load a version to the device before any sequence waits for it."""
        residency = self.ensure(version, now, Depth.IDLE)
        if residency.is_loading:
            self._warming[version.key] = None
        return residency

    def read_ahead(self, version: AdapterVersion, now: float) -> None:
        """Start a read for no request: until a request needs the image, it is the first to leave the host tier."""
        if self.ensure(version, now, Depth.IDLE).is_loading:
            self._read_ahead[version.key] = True

    def poll(self, now: float) -> list[tuple[AdapterKey, str]]:
        """Process completed loads; return the versions that do not reach the device for it, with the reason."""
        if not self._loads:
            return []
        failures = []
        for load in self._loads:
            result = load.work.poll(now)
            if result is None:
                continue
            assert isinstance(result, LoadResult)
            residency = self._residencies[load.version.key]
            self._finish(load, result, now)
            # A failed read fails the copy that follows it, unless that had all it needed: the copy's result decides.
            is_outcome = load.tier is Tier.DEVICE or residency.device is TierState.ABSENT
            if result.error is not None and is_outcome:
                failures.append((load.version.key, result.error))
        for key in list(self._warming):
            known = self._residencies.get(key)
            if known is None or not self.warm(known.version, now).is_loading:
                del self._warming[key]
        return failures

    def is_link_busy(self, tier: Tier) -> bool:
        """Whether any load to ``tier`` is in flight."""
        return self._loads.is_busy(tier)

    def route(self, key: AdapterKey, now: float) -> Route:
        """Return the predicted times of the hops that a version has yet to take."""
        return self._loads.route(self._residencies[key], now)

    def _start(self, load: AdapterLoad, now: float) -> None:
        residency = self._residencies[load.version.key]
        residency.begin(load.tier)
        self._loads.started(load.version, load.tier, self._executor.load_adapter(load, now), now)
        num_bytes = load.version.disk_bytes if load.tier is Tier.HOST else load.version.host_bytes
        self._emit(AdapterLoadStarted(now, load.version.key, load.tier, num_bytes))

    def _finish(self, load: LoadInFlight, result: LoadResult, now: float) -> None:
        key, ok = load.version.key, result.error is None
        residency = self._residencies[key]
        is_used = load.tier is Tier.DEVICE and self.cold.get(key) is ARRIVING
        residency.end(load.tier, ok=ok, is_used=is_used)
        self._loads.ended(load, now, ok=ok)
        if load.tier is Tier.HOST:
            self.num_disk_loads += ok
            residency.error = result.error
            is_ahead = self._read_ahead.pop(key, False)
            if ok:
                if result.layer_digests:
                    residency.learnt(result.layer_digests)
                self._failed.pop(key, None)
                self._host[key] = load.version.host_bytes
                if is_ahead and not residency.is_referenced:
                    self._host.move_to_end(key, last=False)
                self.host_bytes += load.version.host_bytes
                self._trim_host(now)
            else:
                self._failed[key] = None
                # Meanwhile, the same content may have been read for a registration that was refused.
                self._executor.drop_adapter(key, Tier.HOST)
        elif ok:
            self.num_loads += 1
            # The claim left its pages held; now they get the class of its references.
            self.refresh(key, now)
            if self.cold.pop(key, None) is not None:
                self._on_arrived(key)  # steps that are planned may read the host copy: it stays until none runs
            else:
                self._drop_second_copy(residency, now)
        elif not is_used:  # else its pages are released with the last step that uses them
            # Sequences that run from the image go on from it, to their end if need be: they lack nothing, and a copy
            # that failed would take pages from others to fail again. The next request for the adapter starts another.
            self._give_up(key)
        if not ok:
            self._warming.pop(key, None)
        self._emit(AdapterLoaded(now, key, load.tier, now - load.started_at, result.error))
        self._free_if_over(key, now)

    # -- dropping copies ---------------------------------------------------------------------------------------------

    def on_dropped(self, key: AdapterKey, now: float) -> None:
        """Handle an eviction: the page cache claimed an adapter's pages for another use."""
        residency = self._residencies[key]
        residency.drop(Tier.DEVICE)
        self.num_evictions += 1
        self._executor.drop_adapter(key, Tier.DEVICE)
        self._emit(AdapterEvicted(now, key, Tier.DEVICE, residency.version.num_pages))

    def _give_up(self, key: AdapterKey) -> None:
        """Release the pages of a failed load, and what the executor knows of it."""
        self._page_cache.release_adapter(key)
        self._executor.drop_adapter(key, Tier.DEVICE)

    def _free_if_over(self, key: AdapterKey, now: float) -> None:
        residency = self._residencies.get(key)
        if residency is None or not residency.is_retired or residency.is_referenced or residency.is_loading:
            return
        if residency.device is TierState.RESIDENT:
            self._page_cache.release_adapter(key)
            residency.drop(Tier.DEVICE)
            self._executor.drop_adapter(key, Tier.DEVICE)
            self._emit(AdapterEvicted(now, key, Tier.DEVICE, residency.version.num_pages))
        if residency.host is TierState.RESIDENT:
            self._drop_host(residency, now)
        self._page_cache.forget_adapter(key, now)
        self._failed.pop(key, None)
        del self._residencies[key]

    def _drop_second_copy(self, residency: Residency, now: float) -> None:
        """Drop the host copy of an adapter that is on the device, where none is to be kept."""
        is_double = residency.device is TierState.RESIDENT and residency.host is TierState.RESIDENT
        if is_double and not self._config.keep_host_copies:
            self._drop_host(residency, now)

    def _drop_host(self, residency: Residency, now: float) -> None:
        key = residency.version.key
        residency.drop(Tier.HOST)
        self.host_bytes -= self._host.pop(key)
        self._executor.drop_adapter(key, Tier.HOST)
        self._emit(AdapterEvicted(now, key, Tier.HOST, 0))
        self.refresh(key, now)  # a reload takes longer now

    def _is_over(self, num_bytes: int, num_adapters: int) -> bool:
        limit = self._config.max_cpu_loras
        return num_bytes > self._host_limit or (limit is not None and num_adapters > limit)

    def _has_host_room(self, version: AdapterVersion) -> bool:
        """Whether one more fits within the limit once every copy that may be dropped is dropped."""
        loading = [load.version.host_bytes for load in self._loads if load.tier is Tier.HOST]
        num_bytes = self.host_bytes + sum(loading) + version.host_bytes
        num_adapters = len(self._host) + len(loading) + 1
        if not self._is_over(num_bytes, num_adapters):
            return True
        for key, host_bytes in self._host.items():  # in the order of dropping: mostly the first few suffice
            if self._can_drop_host(self._residencies[key]):
                num_bytes -= host_bytes
                num_adapters -= 1
                if not self._is_over(num_bytes, num_adapters):
                    return True
        return False

    @staticmethod
    def _can_drop_host(residency: Residency) -> bool:
        """Whether the host copy may be dropped: no load or step reads it, and it could be read again from disk."""
        is_needed = residency.is_referenced and residency.device is not TierState.RESIDENT
        return not (is_needed or residency.is_retired or residency.device is TierState.LOADING)

    def _trim_host(self, now: float) -> None:
        """Drop the least recently used host copies beyond the limit; they remain on disk."""
        if not self._is_over(self.host_bytes, len(self._host)):
            return
        for key in list(self._host):
            residency = self._residencies[key]
            if self._can_drop_host(residency) and key not in self._warming:
                self._drop_host(residency, now)
                if not self._is_over(self.host_bytes, len(self._host)):
                    return
