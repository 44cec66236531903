"""What the live page shows of a server, and the routes of adapters that it may call.

A snapshot has what ``GET /status`` has, less names and rows that the page does not show, and beside it memory by owner,
tenants against their limits and, from the ledger, the engine's seconds of the day. The ledger is read now and then, on
a thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manylora.core.engine.status import AdapterStatus, EngineStats
from manylora.core.errors import ConfigError
from manylora.serving.api.adapters import adapter_fields, admin_routes, status_json
from manylora.serving.api.request import Context, context_of
from manylora.serving.api.status import process_report, replica_row, replicas_in_use
from manylora.serving.hosting.fleet.engines import Replica
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.fleet.snapshot import merge_snapshots
from manylora.serving.http.errors import HttpError, json_response
from manylora.serving.http.page import LivePage, PageAction
from manylora.serving.http.room import CallerUse
from manylora.serving.metrics.status_report import FunctionState, StatusReport
from manylora.serving.metrics.usage import read_usage

__all__ = ["live_page"]

NUM_ADAPTERS = 100  # adapters in a snapshot: the highest tier first, then the busiest
NUM_FUNCTIONS = 100
NUM_TENANTS = 50
NUM_MOVES = 50  # moves in the life of an adapter
READ_USAGE_S = 10.0
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

CALLABLE = {"/adapters/{name:path}", *(f"/adapters/{{name:path}}/{verb}" for verb in ("pin", "unpin", "warm"))}
"""Routes of adapters that the page calls."""

logger = logging.getLogger(__name__)


class PageSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the page shows of a server."""

    report: StatusReport
    adapters: list[dict[str, Any]] = []
    memory_bytes: dict[str, int] = {}  # by owner
    tenants: list[CallerUse] = []
    weights: dict[str, float] = {}  # of tenants
    engine_s: dict[str, dict[str, float]] = {}  # of the day, by ``tenant`` and by ``adapter``, of those that are shown


def live_page(context: Context) -> LivePage:
    """Return the page of a server, or of a backbone of functions."""
    usage = _DayUsage(context.config.usage)

    async def take() -> bytes:
        return msgspec.json.encode(await _snapshot(context, await usage.read(context.monotonic_s())))

    def is_ending() -> bool:
        return context.fleet.engines.state in (EngineState.DRAINING, EngineState.STOPPED)

    changes = [
        PageAction(method, route.path, route.endpoint)
        for route in admin_routes
        for method in ("POST", "DELETE")
        if route.path in CALLABLE and method in (route.methods or ())
    ]
    life = PageAction("GET", "/adapters/{name:path}", adapter_life)
    return LivePage(context.gate, take, is_ending, [*changes, life])


async def adapter_life(request: Request) -> Response:
    """``GET /ui/adapters/{name}``: an adapter, its latencies and its last moves between tiers."""
    context, name = context_of(request), request.path_params["name"]
    _, statuses = merge_snapshots((await context.fleet.engines.snapshots(name=name)).values())
    if not statuses:
        raise HttpError(404, f"There is no adapter {name[:200]!r}.")
    status, metrics = statuses[0], context.metrics
    moves = (one for one in reversed(metrics.moves) if one.move.key == status.version.key)
    return json_response(
        {
            **status_json(status, shows_paths=True),
            "latency": metrics.latency.of_adapter(name, context.monotonic_s()),
            "moves": [
                {"at": at, "tier": move.tier, "kind": move.kind, "took_s": move.took_s, "error": move.error}
                for at, move in islice(moves, NUM_MOVES)
            ],
        }
    )


async def _snapshot(context: Context, engine_s: Mapping[str, Mapping[str, float]]) -> PageSnapshot:
    snapshots = await context.snapshots(NUM_ADAPTERS)
    report = process_report(context, NUM_FUNCTIONS, frozenset(), shows_paths=True)
    memory_bytes, adapters = _memory_of_functions(report.functions), tuple[AdapterStatus, ...]()
    if snapshots:
        stats, statuses = merge_snapshots(snapshots.values(), NUM_ADAPTERS)
        adapters = statuses[:NUM_ADAPTERS]
        stats = dataclasses.replace(stats, running_adapters=(), waiting_adapters=(), resident_adapters=(), fits=())
        memory_bytes = memory_bytes or _memory(context, stats)
        replicas = [replica_row(one, snapshots.get(one.index), 0) for one in replicas_in_use(context)]
        report = msgspec.structs.replace(
            report,
            page_bytes=context.fleet.engines.info.page_bytes,
            engine=stats,
            replicas=tuple(msgspec.structs.replace(one, fits=()) for one in replicas),
        )
    tenants = _tenants(context)
    shown = {"tenant": [one.name for one in tenants], "adapter": [one.name for one in adapters]}
    return PageSnapshot(
        report=report,
        adapters=[
            {**adapter_fields(one, shows_paths=True), "weight_bytes": one.version.weight_bytes} for one in adapters
        ],
        memory_bytes=memory_bytes,
        tenants=tenants,
        weights={one.name: found.weight for one in tenants if (found := context.gate.tenant(one.name)) is not None},
        engine_s={by: {name: seconds.get(name, 0.0) for name in shown[by]} for by, seconds in engine_s.items()},
    )


def _memory(context: Context, stats: EngineStats) -> dict[str, int]:
    """Return bytes by owner: the base, pages, the host tier, and what else the engines' processes have."""
    info = context.fleet.engines.info
    owned = {
        "base": info.base_bytes,
        "kv": stats.num_kv_pages * info.page_bytes,
        "prefix": stats.num_prefix_pages * info.page_bytes,
        "adapters": stats.num_adapter_pages * info.page_bytes,
        "free": stats.num_free_pages * info.page_bytes,
        "host": stats.host_bytes,
    }
    if context.engine_config.simulate is None:
        # Each process on a CPU has mapped the base, which is there once.
        base_bytes = 0 if info.is_accelerated else info.base_bytes
        beside = ("host",) if info.is_accelerated else ("kv", "prefix", "adapters", "host")
        by_pid = {one.pid: one for one in context.fleet.engines.replicas()}
        resident = sum(max(0, _resident_bytes(one) - base_bytes) for one in by_pid.values())
        owned["other"] = max(0, resident - sum(owned[name] for name in beside))
    return owned


def _memory_of_functions(functions: Sequence[FunctionState]) -> dict[str, int]:
    """Return bytes by owner of the processes of functions, beside the base that they share; empty without any."""
    if not functions:
        return {}
    adapters = sum(one.adapter_bytes for one in functions)
    return {"adapters": adapters, "other": max(0, sum(one.own_bytes for one in functions) - adapters)}


def _resident_bytes(replica: Replica) -> int:
    """Return the memory that an engine's process has; 0 for one that has ended, or on another machine."""
    if replica.pid is None or replica.node is not None:
        return 0
    try:
        return int(Path(f"/proc/{replica.pid}/statm").read_text().split()[1]) * PAGE_SIZE
    except (OSError, ValueError, IndexError):
        return 0


def _tenants(context: Context) -> list[CallerUse]:
    """Return the tenants with most answers under way, and as many of the others as there is room for."""
    if not context.gate.tells_tenants:
        return []
    active = {one.name: one for one in context.callers.in_use(NUM_TENANTS)}
    book = context.gate.tenants
    for name, tenant in () if book is None else book.by_name.items():
        if len(active) >= NUM_TENANTS:
            break
        limits = tenant.limits
        zeros = (None if limits.requests is None else 0.0, None if limits.tokens is None else 0.0)
        idle = CallerUse(name=name, num_answers=0, num_adapters=0, requests=zeros[0], tokens=zeros[1], limits=limits)
        active.setdefault(name, idle)
    return list(active.values())


class _DayUsage:
    """The seconds of the day in the ledger, read again after ``READ_USAGE_S``; nothing without a ledger."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._found: dict[str, dict[str, float]] = {}
        self._read_at = -READ_USAGE_S

    async def read(self, now: float) -> Mapping[str, Mapping[str, float]]:
        """Return the engine's seconds by tenant and by adapter; those of the last reading if the ledger is broken."""
        if self._path is not None and now - self._read_at >= READ_USAGE_S:
            self._read_at = now
            try:
                self._found = await asyncio.to_thread(self._sums, self._path)
            except ConfigError as error:
                logger.warning("usage_not_read error=%r", str(error))
        return self._found

    def _sums(self, path: Path) -> dict[str, dict[str, float]]:
        day = datetime.now(UTC).date().isoformat()
        return {
            by: {str(row[0]): float(str(row[-1])) for row in read_usage(path, [by], day)}
            for by in ("tenant", "adapter")
        }
