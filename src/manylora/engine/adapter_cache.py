"""The adapter cache: moves versions up the tiers when sequences need them, and lets them idle in free pages.

It has no size of its own on the device: pages come from the one pool, and an idle adapter stays until its room is
needed. Loads are asynchronous on every hop, so a step never waits for one.

::

    ensure(version)   device resident   -> placed in DEVICE
                      host resident     -> claim pages, start the copy   -> placed in HOST, loading unless none to claim
                      on disk           -> start the read                -> placed nowhere, loading

Source: Chameleon, section 4.2; S-LoRA, section 5.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from manylora.adapters.residency import Residency, TierState
from manylora.config import AdapterConfig
from manylora.events import AdapterEvicted, AdapterLoaded, AdapterLoadStarted, EventSink
from manylora.memory import Depth, IdleItem, PageCache, ReloadCosts
from manylora.plan import IN_HOST, ON_DEVICE, AdapterLoad, LoadResult, Placement
from manylora.ports import Executor, Work
from manylora.types import AdapterKey, AdapterVersion, Tier

__all__ = ["AdapterCache", "Readiness"]


class Readiness(msgspec.Struct, frozen=True):
    """How near an adapter is to running: where a step could read its weights, and whether they move up.

    The values are a handful of constants, so that asking makes nothing.

    Args:
        placement: Where a step could read them now; ``None`` while they are on disk alone. Whether a sequence may run
            from there is the running set's decision.
        is_loading: A hop up the tiers is on its way; if not, and they are not on the device, there was no room.
    """

    placement: Placement | None
    is_loading: bool = False


_DEVICE = Readiness(ON_DEVICE)
_HOST = {is_loading: Readiness(IN_HOST, is_loading) for is_loading in (False, True)}
_DISK = {is_loading: Readiness(None, is_loading) for is_loading in (False, True)}


@dataclass(frozen=True, slots=True)
class _Load:
    version: AdapterVersion
    tier: Tier
    work: Work
    started_at: float


class AdapterCache:
    """Keeps track of every version that a name or a sequence refers to.

    Args:
        page_cache: The pages.
        executor: Carries loads out.
        config: Limits of the host tier.
        costs: Kept up to date with the durations of loads.
        is_pinned: Whether a version is pinned to the device.
        emit: Takes events.
        on_arrived: Told of a version that came to the device while sequences run on it.
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
        self._costs = costs
        self._is_pinned = is_pinned
        self._emit = emit
        self._on_arrived = on_arrived
        self._residencies: dict[AdapterKey, Residency] = {}
        self._loads: list[_Load] = []
        self._host: OrderedDict[AdapterKey, int] = OrderedDict()  # bytes, least recently used first
        self._warming: dict[AdapterKey, None] = {}
        self._link_free_at = {Tier.HOST: 0.0, Tier.DEVICE: 0.0}
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
        """Return the seconds that bringing a version to the device would take from its present tier."""
        version = self._residencies[key].version
        item = IdleItem(key, version.num_pages, 0.0, version.host_bytes, self._read_bytes(key))
        return self._costs.reload_s(item)

    @property
    def num_host(self) -> int:
        """Versions in the host tier."""
        return len(self._host)

    @property
    def has_loads(self) -> bool:
        """Whether any load is in flight."""
        return bool(self._loads)

    def next_event_at(self) -> float:
        """Return when the next load completes, as far as is known; infinite otherwise."""
        return min((load.work.ready_at for load in self._loads), default=math.inf)

    # -- versions come and go ----------------------------------------------------------------------------------------

    def add(self, version: AdapterVersion, now: float) -> None:
        """Take in a version whose weights the executor holds in the host tier."""
        residency = self._residencies.setdefault(version.key, Residency(version))
        residency.is_retired = False
        if residency.host is TierState.ABSENT:
            residency.begin(Tier.HOST)
            residency.end(Tier.HOST, ok=True)
            self._host[version.key] = version.host_bytes
            self.host_bytes += version.host_bytes
            self.refresh(version.key, now)
            self._trim_host(now)

    def price(self, key: AdapterKey, now: float) -> float | None:
        """Return the worth of keeping a version on the device, if it is idle there and the eviction policy knows."""
        return self._page_cache.adapter_price(key, now)

    def refuse(self, version: AdapterVersion) -> None:
        """Give back the host copy of a version that was read and then not registered."""
        residency = self._residencies.get(version.key)
        if residency is None or residency.host is TierState.ABSENT:
            self._executor.drop_adapter(version.key, Tier.HOST)

    def retire(self, key: AdapterKey, now: float) -> None:
        """Let a version go once nothing refers to it: its last name is gone."""
        self._residencies[key].is_retired = True
        self._warming.pop(key, None)
        self.refresh(key, now)  # the name that pinned it may be the one that went
        self._free_if_over(key, now)

    # -- references --------------------------------------------------------------------------------------------------

    def ask(self, key: AdapterKey, now: float) -> None:
        """A request for it arrived, and waits."""
        self._page_cache.adapter_used(key, now)
        self.want(key, now)

    def want(self, key: AdapterKey, now: float) -> None:
        """A waiting sequence asks for it to be spared."""
        self._residencies[key].num_waiting += 1
        self.refresh(key, now)

    def unwant(self, key: AdapterKey, now: float) -> None:
        """A waiting sequence is admitted or gone."""
        residency = self._residencies[key]
        assert residency.num_waiting > 0
        residency.num_waiting -= 1
        self._let_go(key, now)

    def hold(self, key: AdapterKey, now: float) -> None:
        """A sequence starts to run on it."""
        residency = self._residencies[key]
        assert residency.tier is not Tier.DISK, "on disk alone"
        self.num_active += residency.num_running == 0
        residency.num_running += 1
        residency.last_used_at = now
        self.refresh(key, now)

    def release(self, key: AdapterKey, now: float) -> None:
        """A sequence ends or is pre-empted."""
        residency = self._residencies[key]
        assert residency.num_running > 0
        residency.num_running -= 1
        self.num_active -= residency.num_running == 0
        residency.last_used_at = now
        self._let_go(key, now)

    def _let_go(self, key: AdapterKey, now: float) -> None:
        """One reference fewer: it may go idle, and under a policy that keeps nothing idle it goes."""
        self.refresh(key, now)
        residency = self._residencies[key]
        is_idle = residency.device is TierState.RESIDENT and not residency.is_referenced and not self._is_pinned(key)
        if is_idle and not self._page_cache.keeps_idle_adapters:
            self._page_cache.release_adapter(key)
            self.on_dropped(key, now)
        self._free_if_over(key, now)

    def refresh(self, key: AdapterKey, now: float) -> None:
        """Put its pages into the class its references and pins call for."""
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

    def ensure(self, version: AdapterVersion, now: float, depth: Depth) -> Readiness:
        """Bring a version nearer to the device, as far as ``depth`` allows.

        Args:
            version: Which.
            now: Seconds.
            depth: ``WANTED`` may take pages from adapters that others wait for, and overshoot the host limit: it is
                for the sequence that is first in line, so that it always gets on.
        """
        key = version.key
        residency = self._residencies[key]
        if residency.device is TierState.RESIDENT:
            return _DEVICE
        if residency.host is not TierState.RESIDENT:
            if residency.host is TierState.ABSENT:
                if depth is Depth.IDLE and not self._has_host_room(version):
                    return _DISK[False]
                self._start(AdapterLoad(version=version, tier=Tier.HOST), now)
            return _DISK[True]
        if residency.device is TierState.ABSENT:
            pages = self._page_cache.claim_adapter(key, version.num_pages, now, depth)
            if pages is None:
                return _HOST[False]
            self._host.move_to_end(key)
            self._start(AdapterLoad(version=version, tier=Tier.DEVICE, pages=pages), now)
        return _HOST[True]

    def warm(self, version: AdapterVersion, now: float) -> Readiness:
        """Bring a version all the way to the device before any sequence waits for it."""
        readiness = self.ensure(version, now, Depth.IDLE)
        if readiness.is_loading:
            self._warming[version.key] = None
        return readiness

    def poll(self, now: float) -> list[tuple[AdapterKey, str]]:
        """Take in completed loads; return the failed ones with their reason."""
        if not self._loads:
            return []
        failures = []
        in_flight = []
        for load in self._loads:
            result = load.work.poll(now)
            if result is None:
                in_flight.append(load)
                continue
            assert isinstance(result, LoadResult)
            self._finish(load, result, now)
            if result.error is not None:
                failures.append((load.version.key, result.error))
        self._loads = in_flight
        for key in list(self._warming):
            residency = self._residencies.get(key)
            if residency is None or not self.warm(residency.version, now).is_loading:
                del self._warming[key]
        return failures

    def is_link_busy(self, tier: Tier) -> bool:
        """Whether any load to ``tier`` is in flight."""
        return any(load.tier is tier for load in self._loads)

    def _start(self, load: AdapterLoad, now: float) -> None:
        residency = self._residencies[load.version.key]
        residency.begin(load.tier)
        work = self._executor.load_adapter(load, now)
        self._loads.append(_Load(load.version, load.tier, work, now))
        num_bytes = load.version.disk_bytes if load.tier is Tier.HOST else load.version.host_bytes
        self._emit(AdapterLoadStarted(now, load.version.key, load.tier, num_bytes))

    def _finish(self, load: _Load, result: LoadResult, now: float) -> None:
        key, ok = load.version.key, result.error is None
        residency = self._residencies[key]
        residency.end(load.tier, ok=ok)
        self._measure(load, now, ok=ok)
        if load.tier is Tier.HOST:
            self.num_disk_loads += ok
            if ok:
                self._host[key] = load.version.host_bytes
                self.host_bytes += load.version.host_bytes
                self._trim_host(now)
            else:
                # The same content may have been read meanwhile, and its registration refused.
                self._executor.drop_adapter(key, Tier.HOST)
        elif ok:
            self.num_loads += 1
            # Start from "held": the claim left it so.
            self.refresh(key, now)
            if residency.num_running:
                self._on_arrived(key)
        else:
            self._page_cache.release_adapter(key)
        if not ok:
            self._warming.pop(key, None)
        self._emit(AdapterLoaded(now, key, load.tier, now - load.started_at, result.error))
        self._free_if_over(key, now)

    def _measure(self, load: _Load, now: float, *, ok: bool) -> None:
        """Learn the duration of the load itself, from its turn on the link, which serves first in, first out."""
        took_s = now - max(load.started_at, self._link_free_at[load.tier])
        self._link_free_at[load.tier] = now
        if ok and load.tier is Tier.HOST:
            self._costs.read.observe(load.version.disk_bytes, took_s)
        elif ok:
            self._costs.copy.observe(load.version.host_bytes, took_s)

    # -- giving up copies --------------------------------------------------------------------------------------------

    def on_dropped(self, key: AdapterKey, now: float) -> None:
        """The page cache took an adapter's pages for another use."""
        residency = self._residencies[key]
        residency.drop(Tier.DEVICE)
        self.num_evictions += 1
        self._executor.drop_adapter(key, Tier.DEVICE)
        self._emit(AdapterEvicted(now, key, Tier.DEVICE, residency.version.num_pages))

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
        del self._residencies[key]

    def _drop_host(self, residency: Residency, now: float) -> None:
        key = residency.version.key
        residency.drop(Tier.HOST)
        self.host_bytes -= self._host.pop(key)
        self._executor.drop_adapter(key, Tier.HOST)
        self._emit(AdapterEvicted(now, key, Tier.HOST, 0))
        self.refresh(key, now)  # its way back to the device is longer now

    def _is_over(self, num_bytes: int, num_adapters: int) -> bool:
        limit = self._config.max_cpu_loras
        return num_bytes > self._config.host_bytes or (limit is not None and num_adapters > limit)

    def _has_host_room(self, version: AdapterVersion) -> bool:
        """Whether reading one more stays within the limit once all that may go has gone."""
        loading = [load.version.host_bytes for load in self._loads if load.tier is Tier.HOST]
        num_bytes = self.host_bytes + sum(loading) + version.host_bytes
        num_adapters = len(self._host) + len(loading) + 1
        if not self._is_over(num_bytes, num_adapters):
            return True
        for key, host_bytes in self._host.items():  # as they would go: mostly the first few will do
            if self._can_drop_host(self._residencies[key]):
                num_bytes -= host_bytes
                num_adapters -= 1
                if not self._is_over(num_bytes, num_adapters):
                    return True
        return False

    @staticmethod
    def _can_drop_host(residency: Residency) -> bool:
        """Whether the host copy may go: no copy from it is due, no step reads it, and it could be read again."""
        is_needed = residency.is_referenced and residency.device is not TierState.RESIDENT
        return not (is_needed or residency.is_retired or residency.device is TierState.LOADING)

    def _trim_host(self, now: float) -> None:
        """Drop the least recently used host copies beyond the limit; the disk tier has them still."""
        if not self._is_over(self.host_bytes, len(self._host)):
            return
        for key in list(self._host):
            residency = self._residencies[key]
            if self._can_drop_host(residency) and key not in self._warming:
                self._drop_host(residency, now)
                if not self._is_over(self.host_bytes, len(self._host)):
                    return
