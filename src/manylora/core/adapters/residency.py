"""Residency of one adapter version, and its users: a state machine per tier.

::

    host     ABSENT --read--> LOADING --done--> RESIDENT --dropped--> ABSENT
    device   ABSENT --copy--> LOADING --done--> RESIDENT --dropped--> ABSENT
                                 +-----failed---> FAILED --unused-----> ABSENT      (only where a step ran on it)

The disk tier is the source and is never dropped. A copy needs an image in the host tier, or one that is being read: it
then follows the read, layer by layer. Sequences are counted: *running* ones hold the device copy, *waiting* ones ask
the cache to spare it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from manylora.core.types import AdapterVersion, Tier

__all__ = ["Residency", "TierState"]


class TierState(Enum):
    """Whether the weights are in a tier."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    FAILED = "failed"
    """The load failed, and a step in flight still uses its pages; on the device only."""


@dataclass(slots=True)
class Residency:
    """State of one version.

    Args:
        version: The version; with the digests of its layers, once it was read.
        host: State of its host copy.
        device: State of its device copy.
        num_running: Running sequences that use it.
        num_waiting: Waiting sequences that need it.
        is_retired: No name points to it any more; it is dropped when its last request has ended.
        last_used_at: When a sequence last started or stopped using it, in seconds.
        num_loads: Loads begun, to either tier.
        is_late: A step has waited in vain for the layers of the load to the device that is in flight.
        error: The reason why its last read failed, until one succeeds.
    """

    version: AdapterVersion
    host: TierState = TierState.ABSENT
    device: TierState = TierState.ABSENT
    num_running: int = 0
    num_waiting: int = 0
    is_retired: bool = False
    last_used_at: float | None = None
    num_loads: int = 0
    is_late: bool = False
    error: str | None = None

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
        """The highest tier it is in."""
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
        self._set(tier, TierState.LOADING)

    def end(self, tier: Tier, *, ok: bool, is_used: bool = False) -> None:
        """Record the end of a load to ``tier``; ``is_used`` if sequences run on the weights as they arrive."""
        assert self._get(tier) is TierState.LOADING
        assert not is_used or (tier is Tier.DEVICE and self.num_running)
        self._set(tier, TierState.RESIDENT if ok else TierState.FAILED if is_used else TierState.ABSENT)
        if tier is Tier.DEVICE:
            self.is_late = False

    def learnt(self, layer_digests: bytes) -> None:
        """Record the digests of its layers, which its first read has found: reads to come yield layer by layer."""
        self.version = replace(self.version, layer_digests=layer_digests, is_whole=False)

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
