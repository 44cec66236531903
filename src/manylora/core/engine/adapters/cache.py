"""The adapter cache: the versions that names and sequences refer to, the sequences that need each, and what is kept.

It has no size of its own on the device: pages come from the shared pool, and an idle adapter stays until its pages are
needed. ``loader.py`` moves versions up the tiers.

::

    request   ask --> waits --> hold: runs --> release          adapter's pages may be claimed ...
              |-- WANTED ----|-- held --------|-- IDLE --       ... of idle adapters first, of held ones never

Source: Chameleon, section 4.2; S-LoRA, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from math import inf

from manylora.core.engine.adapters.residency import HostCopies, Residencies, Residency, TierState
from manylora.core.memory import Depth, IdleItem, PageCache, ReloadCosts
from manylora.core.plan import IN_HOST, ON_DEVICE, Placement
from manylora.core.ports import Executor
from manylora.core.scheduling import Nearness, Sequence
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["AdapterCache"]


@dataclass(eq=False)
class AdapterCache:
    """Counts the sequences of every version, and keeps or drops its copies accordingly."""

    residencies: Residencies  # the state of every version; versions are added and removed here
    host: HostCopies  # the copies in host memory
    _page_cache: PageCache
    _executor: Executor
    _costs: ReloadCosts  # durations of loads
    _is_pinned: Callable[[AdapterKey], bool]  # whether a version must stay on the device
    # The placement of each version that running sequences do not read from complete pages.
    cold: dict[AdapterKey, Placement] = field(default_factory=dict)
    num_active: int = 0  # versions that a running sequence uses
    _failed: dict[AdapterKey, None] = field(default_factory=dict)

    @property
    def failed(self) -> Collection[AdapterKey]:
        """Versions whose last read failed."""
        return self._failed.keys()

    @property
    def in_pages(self) -> Collection[AdapterKey]:
        """The versions on the device, or loading to it."""
        return self._page_cache.adapters()

    def reload_s(self, key: AdapterKey) -> float:
        """Return the time in seconds to load a version to the device from its present tier."""
        version = self.residencies[key].version
        item = IdleItem(key, version.num_pages, 0.0, version.host_bytes, self._read_bytes(key))
        return self._costs.reload_s(item)

    def price(self, key: AdapterKey, now: float) -> float | None:
        """Return the value of keeping a version on the device, if it is idle there and the eviction policy has one."""
        return self._page_cache.adapter_price(key, now)

    def nearness(self, sequence: Sequence) -> Nearness:
        """Return the distance of a sequence's adapter to the device."""
        if sequence.adapter is None:
            return Nearness.DEVICE
        residency = self.residencies[sequence.adapter]
        if residency.device is TierState.RESIDENT:
            return Nearness.DEVICE
        if residency.device is TierState.LOADING:
            return Nearness.LOADING
        return Nearness.HOST if residency.host is TierState.RESIDENT else Nearness.DISK

    # -- versions ----------------------------------------------------------------------------------------------------

    def add(self, version: AdapterVersion, now: float, tier: Tier = Tier.HOST) -> None:
        """Add a version whose weights the executor holds in the host tier, or that is on disk and was not read yet."""
        residency = self.residencies.setdefault(version.key, Residency(version))
        residency.is_retired = False
        if tier is not Tier.HOST:
            return
        self.note_read(residency, None)
        if residency.host is TierState.ABSENT:
            residency.begin(Tier.HOST)
            residency.end(Tier.HOST, ok=True)
            self.host.add(version)
            self.refresh(version.key, now)
            self.trim_host(now)

    def refuse(self, version: AdapterVersion) -> None:
        """Drop the host copy of a version that was read and then not registered."""
        residency = self.residencies.get(version.key)
        if residency is None or residency.host is TierState.ABSENT:
            for tier in (Tier.HOST, Tier.DISK):
                self._executor.drop_adapter(version.key, tier)

    def retire(self, key: AdapterKey, now: float) -> None:
        """Free a version once nothing refers to it: its last name is gone."""
        residency = self.residencies[key]
        residency.is_retired, residency.is_warming = True, False
        self.refresh(key, now)  # it may have been pinned by that name
        self.free_if_over(key, now)

    def free_if_over(self, key: AdapterKey, now: float) -> None:
        """Forget a version and drop its copies, if no name, sequence or load refers to it."""
        residency = self.residencies.get(key)
        if residency is None or not residency.is_retired or residency.is_referenced or residency.is_loading:
            return
        if residency.device is TierState.RESIDENT:
            self._page_cache.release_adapter(key)
            self.residencies.drop(residency, Tier.DEVICE, now)
        if residency.host is TierState.RESIDENT:
            self.host.drop(residency, now)
        self._executor.drop_adapter(key, Tier.DISK)
        self._page_cache.forget_adapter(key, now)
        self._failed.pop(key, None)
        del self.residencies[key]

    # -- sequences ---------------------------------------------------------------------------------------------------

    def ask(self, key: AdapterKey, now: float, tenant: str = "") -> None:
        """Count a request of a tenant for it that arrived and waits."""
        residency = self.residencies[key]
        if residency.device is TierState.ABSENT:
            residency.tenant = tenant
        self._page_cache.adapter_used(key, now)
        self.want(key, now)

    def want(self, key: AdapterKey, now: float) -> None:
        """Count a waiting sequence; its pages are evicted after idle pages."""
        self.residencies[key].num_waiting += 1
        self.refresh(key, now)

    def unwant(self, key: AdapterKey, now: float) -> None:
        """Count a waiting sequence out: it was admitted, or ended."""
        residency = self.residencies[key]
        assert residency.num_waiting > 0
        residency.num_waiting -= 1
        self._let_go(key, now)

    def hold(self, key: AdapterKey, now: float, placement: Placement = ON_DEVICE) -> None:
        """Count a sequence that starts to run on it, from the same placement as the others that do."""
        residency = self.residencies[key]
        if placement is not ON_DEVICE:
            assert self.cold.get(key, placement) is placement
            self.cold[key] = placement
            if placement is IN_HOST:
                self.host.use(key)
        self.host.ran(key)
        self.num_active += residency.num_running == 0
        residency.num_running += 1
        residency.last_used_at = now
        self.refresh(key, now)

    def release(self, key: AdapterKey, now: float) -> None:
        """Count a running sequence out: it ended, or was pre-empted."""
        residency = self.residencies[key]
        assert residency.num_running > 0
        residency.num_running -= 1
        self.host.ran(key)
        if not residency.num_running:
            self.num_active -= 1
            self.cold.pop(key, None)
            if residency.device is TierState.FAILED:
                self.abandon(key)
                residency.cleared()
            self.drop_second_copy(residency, now)
        residency.last_used_at = now
        self._let_go(key, now)

    def _let_go(self, key: AdapterKey, now: float) -> None:
        """Handle a lost reference: the version may become idle, and is dropped if the policy keeps nothing idle."""
        self.refresh(key, now)
        residency = self.residencies[key]
        is_idle = residency.device is TierState.RESIDENT and not residency.is_referenced and not self._is_pinned(key)
        if is_idle and not self._page_cache.keeps_idle_adapters:
            self._page_cache.release_adapter(key)
            self.residencies.evicted(key, now)
        self.free_if_over(key, now)

    # -- copies ------------------------------------------------------------------------------------------------------

    def refresh(self, key: AdapterKey, now: float) -> None:
        """Set the eviction class of its pages by its references and pins."""
        residency = self.residencies[key]
        if residency.device is not TierState.RESIDENT:
            return
        if residency.num_running or self._is_pinned(key):
            depth = None
        elif residency.num_waiting and (residency.is_unpaid or not self.host.is_by_last_run):
            depth = Depth.WANTED
        else:
            depth = Depth.IDLE
        self._page_cache.set_adapter_depth(
            key, depth, now, copy_bytes=residency.version.host_bytes, read_bytes=self._read_bytes(key)
        )

    def _read_bytes(self, key: AdapterKey) -> int:
        """Return the bytes to be read from disk before the version can be copied to the device."""
        residency = self.residencies[key]
        return 0 if residency.host is TierState.RESIDENT else residency.version.disk_bytes

    def note_read(self, residency: Residency, error: str | None) -> None:
        """Record the outcome of the last read of a version."""
        residency.error = error
        if error is None:
            self._failed.pop(residency.version.key, None)
        else:
            self._failed[residency.version.key] = None

    def abandon(self, key: AdapterKey) -> None:
        """Release the pages of a failed load, and what the executor knows of it."""
        self._page_cache.release_adapter(key)
        self._executor.drop_adapter(key, Tier.DEVICE)

    def drop_second_copy(self, residency: Residency, now: float) -> None:
        """Drop the host copy of an adapter that is on the device, where none is to be kept."""
        if self.host.is_second(residency):
            self._drop_host(residency, now)

    def trim_host(self, now: float, loading: Seq[AdapterVersion] = ()) -> None:
        """Drop host copies beyond the limits: the least recently used, or those that save the least time.

        Those that are ``loading`` count, too.
        """
        order = partial(self._by_worth, now=now) if self.host.is_priced else list[AdapterKey]
        for residency in self.host.beyond_limits(order, loading):
            self._drop_host(residency, now)

    def _by_worth(self, keys: Iterable[AdapterKey], now: float) -> list[AdapterKey]:
        """Return host copies, first those that save the least time of reads per second and part of the limit.

        A copy saves a read only while its adapter is not on the device. Those dear enough to stay there (the dearer
        half) need none, and the dearest least; so they are dropped before all others.
        """

        def price(key: AdapterKey) -> float:
            version = self.residencies[key].version
            return self._page_cache.price(
                IdleItem(key, self.host.size(version), now, read_bytes=version.disk_bytes), now
            )

        on_device = sorted(map(price, self.in_pages))
        stays_from = on_device[len(on_device) // 2] if on_device else inf

        def worth(key: AdapterKey) -> tuple[bool, float]:
            one = price(key)
            stays = self.residencies[key].device is TierState.RESIDENT and one >= stays_from
            return not stays, -one if stays else one

        return sorted(keys, key=worth)

    def _drop_host(self, residency: Residency, now: float) -> None:
        self.host.drop(residency, now)
        self.refresh(residency.version.key, now)  # a reload takes longer now
