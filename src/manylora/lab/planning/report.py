"""Plans as tables for a terminal or a document, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from manylora.lab.measure.tables import FigureTable
from manylora.lab.planning.load_test import LoadTest
from manylora.lab.planning.plan import MOST_SIMULATED, Plan

__all__ = ["BOTTLENECKS", "as_json", "choose_plan", "comparison_table", "plan_tables", "shortage"]

BOTTLENECKS = {
    "seats": "seats: max_num_seqs sequences are running",
    "memory": "memory: no free pages for KV",
    "link": "the link: adapters are being copied from the host",
    "compute": "compute: the base model's arithmetic",
    "bandwidth": "memory bandwidth: reading weights and KV",
    "adapters": "adapters: their arithmetic",
    "network": "network: all-reduces between devices",
    "host": "host: launches and the time between steps",
    "device": "the device: its steps",
}
"""Descriptions of bottlenecks."""


def plan_tables(plan: Plan) -> list[FigureTable]:
    """Return the tables of one plan."""
    return [table for table in (_outcome(plan), _memory(plan), _device(plan)) if table is not None]


def choose_plan(plans: Sequence[Plan]) -> int | None:
    """Return the place of the plan that serves its traffic within the SLO at the least cost; ``None`` if none does.

    Where a plan has no price, that of the fewest devices for each request per second.
    """
    costs: dict[int, float] = {}
    for place, plan in enumerate(plans):
        if plan.served is not None and plan.num_devices is not None:
            rate = plan.served.rate if plan.demand.rate is None else plan.demand.rate
            costs[place] = plan.num_devices / rate if plan.cost is None else plan.cost.per_million_requests
    if len({plans[place].cost is None for place in costs}) != 1:
        return None
    return min(costs, key=costs.__getitem__)


def shortage(plan: Plan) -> str | None:
    """Return that the recording is shorter than a load test of the plan should be; ``None`` if it is not."""
    for one in (plan.served, plan.capacity.met):
        if one is not None and one.num_missing > 0:
            num = min(len(run.run.records) for run in one.runs)
            had = f"{num:,} requests, all of the recording, not {num + one.num_missing:,}"
            return (
                f"a run at {one.rate:.3g} req/s had {had}: "
                "too short for queues to grow, so the capacity may be too high; take a longer recording"
            )
    return None


def comparison_table(plans: Sequence[tuple[Mapping[str, str], Plan]]) -> FigureTable:
    """Return several plans side by side, each with the settings that distinguish it."""
    labels = tuple(plans[0][0])
    with_cost = any(plan.cost is not None for _, plan in plans)
    with_devices = any(plan.tensor_parallel_size > 1 for _, plan in plans)
    there = f"P{plans[0][1].objective.percentile:g} there"
    columns = [*labels, "req/s per replica", there, "replicas", *["devices"] * with_devices, "hit rate", "device busy"]
    rows = []
    for settings, plan in plans:
        row = [*settings.values(), f"{plan.capacity.rate:.2f}", _measured(plan.capacity.met)]
        row += [_count(plan), *[str(plan.num_devices or "-")] * with_devices]
        row.append(_share(plan.usage.hit_rate if plan.usage else None))
        row += [_share(plan.usage.device_busy if plan.usage else None), plan.binds or "-"]
        if with_cost:
            row.append(f"{plan.cost.per_million_output_tokens:.2f}" if plan.cost else "-")
        rows.append(tuple(row))
    return FigureTable(columns=(*columns, "limit", *["per million output tokens"] * with_cost), rows=tuple(rows))


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan without its single requests; infinity is ``null``."""
    capacity = plan.capacity
    content: dict[str, Any] = _finite(
        {
            "objective": asdict(plan.objective),
            "demand": asdict(plan.demand),
            "never_idle_requests_per_s": plan.most_per_s,
            "capacity_requests_per_s": capacity.rate,
            "is_bounded": capacity.missed is not None,
            "load_tests": [_load_test(load_test) for load_test in capacity.load_tests],
            "binds": plan.binds,
            "num_replicas": plan.num_replicas,
            "num_devices": plan.num_devices,
            "is_simulated": plan.is_simulated,
            "served": _load_test(plan.served) if plan.served else None,
            "usage": asdict(plan.usage) if plan.usage else None,
            "cost": asdict(plan.cost) if plan.cost else None,
        }
    )
    return content


def _load_test(load_test: LoadTest) -> dict[str, Any]:
    return {
        "requests_per_s": load_test.rate,
        "num_replicas": load_test.num_replicas,
        "is_kept": load_test.is_met,
        "measured_s": load_test.measured,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _outcome(plan: Plan) -> FigureTable:
    capacity, usage = plan.capacity, plan.usage
    rows = [("objective", _objective(plan))]
    if capacity.met is None:
        lowest = capacity.missed
        assert lowest is not None
        tried = (
            f"{_with_percentile(plan, lowest)} at {lowest.rate:.3g} req/s"
            if lowest.runs
            else "stopped early at every rate"
        )
        rows.append(("capacity", f"none: {tried}"))
        return FigureTable(columns=("", ""), rows=tuple(rows))
    assert usage is not None
    bound = "" if capacity.missed is not None else "at least "
    rows += [
        ("capacity of a replica", f"{bound}{capacity.rate:.2f} req/s"),
        ("  measured there", _with_percentile(plan, capacity.met)),
        ("  if it were never idle", f"{plan.most_per_s:.2f} req/s"),
        ("bottleneck", BOTTLENECKS[plan.binds or "device"]),
    ]
    if plan.demand.rate is not None and plan.served is not None:
        if plan.num_replicas is None:
            found = f"more than {MOST_SIMULATED}, which together miss the SLO"
        elif plan.is_simulated:
            found = f"{_count(plan)} ({_with_percentile(plan, plan.served)})"
        else:
            found = f"{_count(plan)} (by division, too many to simulate together)"
        rows.append((f"replicas for {plan.demand.rate:g} req/s", found))
    if plan.tensor_parallel_size > 1:
        rows.append(("devices of a replica", str(plan.tensor_parallel_size)))
    rows += [
        ("adapters found on the device", _share(usage.hit_rate)),
        ("device busy", _share(usage.device_busy)),
        ("link busy", _share(usage.link_busy)),
        ("waiting for adapters alone", f"{_share(usage.adapter_wait)} of time to first token"),
        ("requests pre-empted", _share(usage.preempted)),
        ("sequences in a step", f"{usage.mean_running:.1f}"),
    ]
    if plan.cost is not None:
        rows += [
            ("cost per hour", f"{plan.cost.per_hour:.2f}"),
            ("  per million output tokens", f"{plan.cost.per_million_output_tokens:.3f}"),
            ("  per million tokens", f"{plan.cost.per_million_tokens:.3f}"),
            ("  per million requests", f"{plan.cost.per_million_requests:.0f}"),
        ]
    return FigureTable(columns=("", ""), rows=tuple(rows))


def _memory(plan: Plan) -> FigureTable | None:
    if plan.usage is None:
        return None
    memory = plan.usage.memory
    rows = [] if memory.weights is None else [("weights", *[f"{memory.weights / 1e9:.2f}"] * 2)]
    rows += [(owner, f"{memory.mean[owner] / 1e9:.2f}", f"{memory.highest[owner] / 1e9:.2f}") for owner in memory.mean]
    return FigureTable(title="Memory of a replica, GB", columns=("", "mean", "highest"), rows=tuple(rows))


def _device(plan: Plan) -> FigureTable | None:
    if plan.usage is None or not plan.usage.step_parts:
        return None
    rows = tuple((BOTTLENECKS[name], f"{share:.1%}") for name, share in plan.usage.step_parts.items())
    return FigureTable(title="Time of a step by part", columns=("", "share of time"), rows=rows)


def _objective(plan: Plan) -> str:
    percentile = f"{plan.objective.percentile:g}"
    return ", ".join(f"P{percentile} {name.upper()} <= {limit:g} s" for name, limit in plan.objective.limits())


def _measured(load_test: LoadTest | None, prefix: str = "") -> str:
    if load_test is None:
        return "-"
    return ", ".join(f"{prefix}{name.upper()} {seconds:.3g} s" for name, seconds in load_test.measured.items())


def _with_percentile(plan: Plan, load_test: LoadTest | None) -> str:
    return _measured(load_test, f"P{plan.objective.percentile:g} ")


def _count(plan: Plan) -> str:
    if plan.num_replicas is None:
        return "-"
    return str(plan.num_replicas) if plan.is_simulated else f"about {plan.num_replicas}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
