"""Loads in flight, in the order of their links: what they cost once they have ended, and when those to come will end.

A link serves loads first in, first out. A copy may be *chained* to the read of the same version: it follows the read
layer by layer, and leaves the link to others while it waits for the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from manylora.core.adapters.residency import Residency, TierState
from manylora.core.costs.cold_start import Route
from manylora.core.memory import ReloadCosts
from manylora.core.ports import Work
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["LoadInFlight", "LoadsInFlight"]

CHAINED_COPY = 2.0
"""Duration of a chained copy, in durations of its read, from which on the link and not the disk held it up."""


LATE = 1.25
"""Least duration of a load in flight, in durations so far: one that is late is likely to be late for longer."""


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
        """Return the time from which the link alone decides its end, if it had its turn at ``begins_at``.

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
        self._loads: list[LoadInFlight] = []
        self._link_free_at = {Tier.HOST: 0.0, Tier.DEVICE: 0.0}

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[LoadInFlight]:
        return iter(list(self._loads))

    def next_event_at(self) -> float:
        """Return the time at which the next load completes; infinite if unknown."""
        return min((load.work.ready_at for load in self._loads), default=math.inf)

    def is_busy(self, tier: Tier) -> bool:
        """Whether any load to ``tier`` is in flight."""
        return any(load.tier is tier for load in self._loads)

    def started(self, version: AdapterVersion, tier: Tier, work: Work, now: float) -> None:
        """Add a load that was just started."""
        read = self._find(version.key, Tier.HOST) if tier is Tier.DEVICE else None
        self._loads.append(LoadInFlight(version, tier, work, now, read))

    def ended(self, load: LoadInFlight, now: float, *, ok: bool) -> None:
        """Remove a load, and learn its own duration, without the wait for its link."""
        self._loads.remove(load)
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

    def _find(self, key: AdapterKey, tier: Tier) -> LoadInFlight | None:
        return next((load for load in self._loads if load.tier is tier and load.version.key == key), None)

    def _hop(self, version: AdapterVersion, tier: Tier, now: float) -> tuple[float, float]:
        """Return the begin of a load, from now (negative if it has begun), and its duration, in seconds."""
        free_at = self._link_free_at[tier]
        for load in self._loads:
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
