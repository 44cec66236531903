"""Residency of adapter versions: a state machine per version and tier, its users, and the copies in host memory.

::

    host     ABSENT --read--> LOADING --done--> RESIDENT --dropped--> ABSENT
    device   ABSENT --copy--> LOADING --done--> RESIDENT --dropped--> ABSENT
                                 +-----failed---> FAILED --unused-----> ABSENT      (only where a step ran on it)

The disk tier is the source and is never dropped. A copy needs an image in the host tier, or one that is being read: it
then follows the read, layer by layer. Sequences are counted: *running* sequences hold the device copy, *waiting*
sequences ask the cache to spare it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from manylora.core.config import AdapterConfig
from manylora.core.engine.status import Telemetry
from manylora.core.events import AdapterEvicted
from manylora.core.ports import Executor
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["HostCopies", "Residencies", "Residency", "TierState"]


class TierState(Enum):
    """Whether the weights are in a tier."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    FAILED = "failed"  # the load failed, and a step in flight still uses its pages; on the device only


@dataclass(slots=True)
class Residency:
    """State of one version."""

    version: AdapterVersion  # the version; with the digests of its layers, once it was read
    host: TierState = TierState.ABSENT  # state of its host copy
    device: TierState = TierState.ABSENT  # state of its device copy
    num_running: int = 0  # running sequences that use it
    num_waiting: int = 0  # waiting sequences that need it
    is_retired: bool = False  # no name points to it any more; it is dropped when its last request has ended
    last_used_at: float | None = None  # when a sequence last started or stopped using it, in seconds
    num_loads: int = 0  # loads begun, to either tier
    tenant: str = ""  # the tenant whose request asked for it when it was not on the device
    is_unpaid: bool = False  # a load to the device has begun, and no sequence was admitted since
    is_warming: bool = False  # it is loaded to the device before any sequence waits for it
    is_late: bool = False  # a step has waited in vain for the layers of the load to the device that is in flight
    error: str | None = None  # the reason why its last read failed, until one succeeds

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight to any tier, or a failed one has not released its pages."""
        return self.host is TierState.LOADING or self.device in (TierState.LOADING, TierState.FAILED)

    @property
    def is_referenced(self) -> bool:
        """Whether any sequence in flight needs it."""
        return self.num_running + self.num_waiting > 0

    @property
    def tier(self) -> Tier:
        """The highest tier that the version is in."""
        if self.device is TierState.RESIDENT:
            return Tier.DEVICE
        return Tier.HOST if self.host is TierState.RESIDENT else Tier.DISK

    @property
    def state(self) -> str:
        """``idle``, ``active``, ``loading``, ``failed`` or ``evicting``, for the API."""
        if self.is_retired:
            return "evicting"
        if self.is_loading:
            return "loading"
        if self.error is not None:
            return "failed"
        return "active" if self.num_running else "idle"

    def begin(self, tier: Tier) -> None:
        """Record the start of a load to ``tier``."""
        assert self._get(tier) is TierState.ABSENT
        assert tier is not Tier.DEVICE or self.host is not TierState.ABSENT, "copies start from the host"
        self.num_loads += 1
        self.is_unpaid |= tier is Tier.DEVICE
        self._set(tier, TierState.LOADING)

    def end(self, tier: Tier, *, ok: bool, is_used: bool = False) -> None:
        """Record the end of a load to ``tier``; ``is_used`` if sequences run on the weights as they arrive."""
        assert self._get(tier) is TierState.LOADING
        assert not is_used or (tier is Tier.DEVICE and self.num_running)
        self._set(tier, TierState.RESIDENT if ok else TierState.FAILED if is_used else TierState.ABSENT)
        if tier is Tier.DEVICE:
            self.is_late = False

    def take_load(self) -> int:
        """Return the pages of a load to the device that no sequence has been admitted on yet; the next gets 0."""
        num_pages = self.version.num_pages if self.is_unpaid else 0
        self.is_unpaid = False
        return num_pages

    def learnt(self, layer_digests: bytes) -> None:
        """Record the digests of its layers, which its first read has found: reads to come yield layer by layer."""
        self.version = replace(self.version, layer_digests=layer_digests, is_whole=False)

    def moved(self, version: AdapterVersion) -> None:
        """Record another place of the same content, which is read from there from now on."""
        self.version = replace(self.version, source=version.source, file_key=version.file_key)

    def was_late(self) -> None:
        """Record that a step has ceased to wait for its layers: none begins on them before the load is over."""
        self.is_late = self.device is TierState.LOADING

    def cleared(self) -> None:
        """Record that the pages of a failed load were released."""
        assert self.device is TierState.FAILED and not self.num_running
        self.device = TierState.ABSENT

    def drop(self, tier: Tier) -> None:
        """Record that the copy in ``tier`` was dropped."""
        assert self._get(tier) is TierState.RESIDENT
        assert tier is not Tier.DEVICE or not self.num_running, "in use"
        assert tier is not Tier.HOST or self.device is not TierState.LOADING, "being copied from"
        self._set(tier, TierState.ABSENT)

    def _get(self, tier: Tier) -> TierState:
        assert tier is not Tier.DISK
        return self.host if tier is Tier.HOST else self.device

    def _set(self, tier: Tier, state: TierState) -> None:
        if tier is Tier.HOST:
            self.host = state
        else:
            self.device = state


class Residencies(dict[AdapterKey, Residency]):
    """The state of every version that a name or a sequence refers to, and the dropping of their copies."""

    def __init__(self, executor: Executor, telemetry: Telemetry) -> None:
        super().__init__()
        self._executor = executor
        self._telemetry = telemetry

    def drop(self, residency: Residency, tier: Tier, now: float) -> None:
        """Drop a version's copy in ``tier``; pages of a copy on the device must be free already."""
        residency.drop(tier)
        version = residency.version
        self._executor.drop_adapter(version.key, tier)
        num_pages = version.num_pages if tier is Tier.DEVICE else 0
        self._telemetry.emit(AdapterEvicted(now, version.key, tier, num_pages))

    def evicted(self, key: AdapterKey, now: float) -> None:
        """Learn that the page cache claimed an adapter's pages for another use."""
        self._telemetry.counters.num_evictions += 1
        self.drop(self[key], Tier.DEVICE, now)


class HostCopies:
    """The copies in host memory, least recently used first; those beyond the limits are dropped and remain on disk.

    The configuration bounds their number, and says whether one stays there that is on the device too, whether the
    least recently used is dropped first (``is_priced`` if not: the caller gives the order), and whether waiting
    requests spare their copies (``is_by_last_run`` if not: a copy is also used when its adapter runs). They spare one
    that was not used yet in any case, or two requests that wait would have each other's read again for ever.
    """

    def __init__(self, residencies: Residencies, config: AdapterConfig, most_bytes: int) -> None:
        self._residencies = residencies
        self._most_adapters = config.max_cpu_loras
        self._most_bytes = most_bytes
        self._keeps_second_copies = config.keep_host_copies
        self.is_priced = config.host_eviction == "price"
        self.is_by_last_run = config.by_last_run
        self._copies: OrderedDict[AdapterKey, int] = OrderedDict()  # bytes, least recently used first
        self._unused: set[AdapterKey] = set()  # since they arrived
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def recent(self) -> Iterator[AdapterKey]:
        """Return the versions, the most recently used first."""
        return reversed(self._copies)

    def add(self, version: AdapterVersion, *, is_first_to_go: bool = False) -> None:
        """Count a copy that has arrived, as used now or, with ``is_first_to_go``, before all others."""
        self._copies[version.key] = version.host_bytes
        self._unused.add(version.key)
        self.num_bytes += version.host_bytes
        if is_first_to_go:
            self._copies.move_to_end(version.key, last=False)

    def use(self, key: AdapterKey) -> None:
        """Learn that a copy is used."""
        self._copies.move_to_end(key)
        self._unused.discard(key)

    def ran(self, key: AdapterKey) -> None:
        """Learn that steps begin or cease to run a version, from any tier."""
        if self.is_by_last_run and key in self._copies:
            self.use(key)

    def drop(self, residency: Residency, now: float) -> None:
        """Drop a version's copy in host memory; the adapter's files stay on disk."""
        self._residencies.drop(residency, Tier.HOST, now)
        self.num_bytes -= self._copies.pop(residency.version.key)
        self._unused.discard(residency.version.key)

    def is_second(self, residency: Residency) -> bool:
        """Whether a version is on the device as well, where no second copy is kept."""
        is_double = residency.device is TierState.RESIDENT and residency.host is TierState.RESIDENT
        return is_double and not self._keeps_second_copies

    def has_spare(self, version: AdapterVersion) -> bool:
        """Whether a version fits without dropping another copy."""
        return not self._is_over(self.num_bytes + version.host_bytes, len(self._copies) + 1)

    def has_room(self, version: AdapterVersion, loading: list[AdapterVersion]) -> bool:
        """Whether a version fits beside those that are loading, once every copy that may be dropped is dropped."""
        num_bytes = self.num_bytes + sum([one.host_bytes for one in loading]) + version.host_bytes
        num_adapters = len(self._copies) + len(loading) + 1
        if not self._is_over(num_bytes, num_adapters):
            return True
        for key, host_bytes in self._copies.items():  # in the order of dropping: mostly the first few suffice
            if self._may_drop(self._residencies[key]):
                num_bytes -= host_bytes
                num_adapters -= 1
                if not self._is_over(num_bytes, num_adapters):
                    return True
        return False

    def beyond_limits(
        self, order: Callable[[Iterable[AdapterKey]], list[AdapterKey]], loading: Sequence[AdapterVersion] = ()
    ) -> Iterator[Residency]:
        """Yield the copies to be dropped until the limits are met, each dropped before the next is asked for.

        ``order`` is asked for the order of all copies, given the least recently used first, only beyond the limits.
        Those that are ``loading`` count, too.
        """
        num_bytes = sum([version.host_bytes for version in loading])
        if not self._is_over(self.num_bytes + num_bytes, len(self._copies) + len(loading)):
            return
        for key in order(self._copies):
            residency = self._residencies[key]
            if self._may_drop(residency) and not residency.is_warming:
                yield residency
                if not self._is_over(self.num_bytes + num_bytes, len(self._copies) + len(loading)):
                    return

    def size(self, version: AdapterVersion) -> int:
        """Return the part of the limit that a copy takes: one of a number, or its bytes."""
        return version.host_bytes if self._most_adapters is None else 1

    def _is_over(self, num_bytes: int, num_adapters: int) -> bool:
        most = self._most_adapters
        return num_bytes > self._most_bytes or (most is not None and num_adapters > most)

    def _may_drop(self, residency: Residency) -> bool:
        """Whether no load or step reads a copy, and it could be read again from disk."""
        is_spared = not self.is_by_last_run or residency.version.key in self._unused
        is_referenced = residency.is_referenced if is_spared else residency.num_running
        is_needed = is_referenced and residency.device is not TierState.RESIDENT
        return not (is_needed or residency.is_retired or residency.device is TierState.LOADING)
