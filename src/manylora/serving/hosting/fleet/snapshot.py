"""Snapshots of several engines as one: sums of counters, and the highest tier of each adapter."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TypeAlias

from manylora.core.engine.status import AdapterStatus, ColdStartStatus, EngineStats
from manylora.core.types import Tier

__all__ = ["STATES", "Snapshot", "merge_snapshots"]

Snapshot: TypeAlias = tuple[EngineStats, tuple[AdapterStatus, ...]]
"""The counters of an engine and the state of its adapters, or of a fleet."""

HEIGHT = {Tier.DISK: 0, Tier.HOST: 1, Tier.DEVICE: 2}
STATES = ("idle", "evicting", "failed", "loading", "active")
"""States of an adapter; over several engines the latest in this order is reported."""


def merge_snapshots(snapshots: Iterable[Snapshot], num_adapters: int | None = None) -> Snapshot:
    """Return the snapshot of a fleet, with every adapter or the busiest ``num_adapters``."""
    parts = list(snapshots)
    if len(parts) == 1:
        return parts[0]
    statuses = _merge_statuses([statuses for _, statuses in parts])
    if num_adapters is not None:
        statuses = _busiest(statuses, num_adapters)
    return _merge_stats([stats for stats, _ in parts]), statuses


def _merge_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Return the stats of a fleet: sums, unions of names, and the queues and fits of all engines."""
    sums = {
        one.name: sum(getattr(part, one.name) for part in parts) for one in fields(EngineStats) if one.type == "int"
    }
    return replace(
        parts[0],
        **sums
        | {
            "num_registered": max(part.num_registered for part in parts),  # every engine has every name
            "running_adapters": _names(part.running_adapters for part in parts),
            "waiting_adapters": _names(part.waiting_adapters for part in parts),
            "resident_adapters": _names(part.resident_adapters for part in parts),
            "fits": tuple(fit for part in parts for fit in part.fits),
            "queues": tuple(queue for part in parts for queue in part.queues),
            "cold_starts": _merge_cold_starts([one for part in parts for one in part.cold_starts]),
        },
    )


def _merge_statuses(parts: Sequence[Sequence[AdapterStatus]]) -> tuple[AdapterStatus, ...]:
    """Return the state of every adapter over all engines."""
    by_name: dict[str, list[AdapterStatus]] = {}
    for part in parts:
        for status in part:
            by_name.setdefault(status.name, []).append(status)
    return tuple(_merge(statuses) for statuses in by_name.values())


def _busiest(statuses: Iterable[AdapterStatus], num_adapters: int) -> tuple[AdapterStatus, ...]:
    """Return adapters by highest tier, then those with requests or failures, then the most used; as an engine does."""

    def use(status: AdapterStatus) -> tuple[int, bool, int]:
        if status.error is not None:
            return HEIGHT[Tier.HOST], True, status.num_requests
        return HEIGHT[status.tier], status.num_running + status.num_waiting > 0, status.num_requests

    return tuple(heapq.nlargest(num_adapters, statuses, key=use))


def _merge(statuses: Sequence[AdapterStatus]) -> AdapterStatus:
    used = [one.last_used_s for one in statuses if one.last_used_s is not None]
    prices = [one.price for one in statuses if one.price is not None]
    return replace(
        statuses[0],
        generation=max(one.generation for one in statuses),
        tier=max((one.tier for one in statuses), key=HEIGHT.__getitem__),
        state=max((one.state for one in statuses), key=STATES.index),
        is_pinned=all(one.is_pinned for one in statuses),
        num_running=sum(one.num_running for one in statuses),
        num_waiting=sum(one.num_waiting for one in statuses),
        num_requests=sum(one.num_requests for one in statuses),
        num_hits=sum(one.num_hits for one in statuses),
        last_used_s=min(used, default=None),
        price=max(prices, default=None),
        error=next((one.error for one in statuses if one.error is not None), None),
    )


def _merge_cold_starts(statuses: Iterable[ColdStartStatus]) -> tuple[ColdStartStatus, ...]:
    """Return one status per mode: sums, means over all measured requests, and the mean correction of the engines."""
    by_mode: dict[str, list[ColdStartStatus]] = {}
    for one in statuses:
        by_mode.setdefault(one.mode, []).append(one)
    return tuple(
        ColdStartStatus(
            mode=mode,
            num_starts=sum(one.num_starts for one in each),
            num_measured=(num_measured := sum(one.num_measured for one in each)),
            expected_s=sum(one.expected_s for one in each),
            actual_s=sum(one.actual_s for one in each),
            error_s=sum(one.num_measured * one.error_s for one in each) / max(1, num_measured),
            relative_error=sum(one.num_measured * one.relative_error for one in each) / max(1, num_measured),
            correction=sum(one.correction for one in each) / len(each),
        )
        for mode, each in by_mode.items()
    )


def _names(parts: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for part in parts for name in part}))
