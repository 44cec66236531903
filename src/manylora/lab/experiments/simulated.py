"""Run a case on the simulator, and reduce the run to figures and curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from manylora.core.adapters.shape import BaseShape
from manylora.core.scheduling.policies.chameleon.clustering import cluster, cut_offs
from manylora.core.scheduling.policies.request_size import Demand, RequestSizer
from manylora.core.types import AdapterVersion, ColdStart, Tier
from manylora.lab.costs.idle import IdleEngineTimes, times_on_idle_engine
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.experiments.cases import Case, Curve, Result, cdf, prepare
from manylora.lab.measure import RequestRecord, Slo, counted_of
from manylora.lab.sim.run.simulation import Run, SimulationConfig, simulate

__all__ = ["CLASSES", "run_case"]

CLASSES = ("small", "medium", "large")
BIN_S = 20.0  # width of the bins of figures over time, in seconds


def run_case(case: Case) -> Result:
    """Run a case; ``ConfigError`` if something in its description is wrong, or a trace is missing."""
    workload, versions, config = prepare(case)
    run = simulate(workload, config)
    idle = times_on_idle_engine(workload.requests, versions, config.cost)
    counted = [one for one in run.records if one.arrived_at >= case.warm_up_s]
    good = [one for one in counted if one.error is None]
    figures = {
        **_felt(run, case),
        **_prefill(good),
        **_moved(run, case, versions),
        **_cold_starts(run),
        **_by_rank(good),
        **_by_class(good, versions, config.base),
        **_against_idle(good, idle),
    }
    curves = {
        "ttft_cdf": cdf(one.ttft_s for one in good if one.ttft_s is not None),
        "e2e_cdf": cdf(one.e2e_s for one in good),
        "adapter_wait_cdf": cdf(one.adapter_wait_s for one in good),
        "slowdown_cdf": cdf(_slowdowns(good, idle)),
        "ttft_p99_over_time": _p99_over_time(run.records),
        **_memory_over_time(run, config),
    }
    return Result(figures, curves)


def _felt(run: Run, case: Case) -> dict[str, float]:
    """Latencies and shares of all requests; none of what no counted request has."""
    summary = run.summary(slo=Slo(ttft_s=case.slo_s, tpot_s=case.slo_tpot_s), warm_up_s=case.warm_up_s)
    num_cold = sum(one.was_resident is False for one in counted_of(run.records, case.warm_up_s))
    figures = {
        "requests": summary.num_requests,
        "errors": summary.num_errors,
        "requests_per_s": summary.requests_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "slo_attainment": summary.slo_attainment,
        "cold_starts_per_s": num_cold / summary.duration_s if num_cold else 0.0,
        "preempted": summary.preempted_share,
        "squashed": summary.squashed_share,
    }
    if summary.hit_rate is not None:
        figures["hit_rate"] = summary.hit_rate
    for name in ("ttft", "tbt", "tpot", "e2e", "queueing"):
        if (found := getattr(summary, name)) is not None:
            figures |= {f"{name}_{part}": getattr(found, part) for part in ("mean", "p50", "p90", "p99")}
    return figures


def _prefill(records: Seq[RequestRecord]) -> dict[str, float]:
    """Times from admission to the first token, with waits for the adapter."""
    times = [
        one.ttft_s - one.queueing_s + one.adapter_wait_s
        for one in records
        if one.ttft_s is not None and one.queueing_s is not None
    ]
    return {"prefill_mean": _mean(times), "prefill_p99": float(np.quantile(times, 0.99))} if times else {}


def _moved(run: Run, case: Case, versions: dict[str, AdapterVersion]) -> dict[str, float]:
    """Copies over the link, and the time that requests waited for them."""
    loads = [timeline.loads[Tier.DEVICE] for timeline in run.timelines]
    sent = Counter(one.replica for one in run.records)
    waits = np.array([one.adapter_wait_s for one in run.records if one.arrived_at >= case.warm_up_s])
    asked_bytes = sum(versions[one.adapter].host_bytes for one in run.records if one.adapter)
    loaded_bytes = sum(sum(one.num_bytes) for one in loads)
    return {
        "loading_avoided": 1.0 - loaded_bytes / asked_bytes if asked_bytes else 1.0,
        "loads": sum(len(one.at) for one in loads),
        "loads_per_s": sum(len(one.at) for one in loads) / run.duration_s,
        "busiest_over_mean": max(sent.values()) * len(run.timelines) / sent.total() if sent else 1.0,
        "link_bytes_per_s": loaded_bytes / run.duration_s,
        "link_busy": sum(sum(one.busy_s) for one in loads) / run.duration_s,
        "adapter_wait_none": float(np.mean(waits <= 0.0)) if len(waits) else 1.0,
        "adapter_wait_p99": float(np.quantile(waits, 0.99)) if len(waits) else 0.0,
        "adapter_wait_max": float(np.max(waits, initial=0.0)),
        "adapter_wait_mean": float(np.mean(waits)) if len(waits) else 0.0,
    }


def _cold_starts(run: Run) -> dict[str, float]:
    """Share of all requests that started cold, by mode, and the errors of predicted times to first token."""
    starts = [one for stats in run.stats for one in stats.cold_starts]
    num_measured = sum(one.num_measured for one in starts)
    errors = sum(one.relative_error * one.num_measured for one in starts)
    counts = Counter(dict.fromkeys((f"cold_{mode.value}" for mode in ColdStart), 0))
    for one in starts:
        counts[f"cold_{one.mode}"] += one.num_starts
    shares = {name: count / len(run.records) for name, count in counts.items()}
    return {**shares, "cold_error": errors / num_measured if num_measured else 0.0}


def _by_rank(records: Seq[RequestRecord]) -> dict[str, float]:
    by_rank: dict[int, list[float]] = {}
    for one in records:
        if one.ttft_s is not None:
            by_rank.setdefault(one.rank, []).append(one.ttft_s)
    return {f"ttft_p99_rank_{rank}": float(np.quantile(by_rank[rank], 0.99)) for rank in sorted(by_rank)}


def _by_class(records: Seq[RequestRecord], versions: dict[str, AdapterVersion], base: BaseShape) -> dict[str, float]:
    """Times of queueing by class of true size, cut as Chameleon cuts its queues."""
    demands = [
        Demand(
            prompt=one.num_prompt_tokens,
            output=one.num_output_tokens,
            adapter=versions[one.adapter].num_pages * base.page.block_size if one.adapter else 0,
        )
        for one in records
    ]
    if not demands:
        return {}
    sizer = RequestSizer("degree-2")
    sizer.fit(demands)
    sizes = [sizer.size(demand) for demand in demands]
    cuts = cut_offs(cluster(sizes, len(CLASSES))[-1])
    figures: dict[str, float] = {}
    for place, name in enumerate(CLASSES):
        members = [one for one, size in zip(records, sizes, strict=True) if sum(size >= cut for cut in cuts) == place]
        waits = [one.queueing_s or 0.0 for one in members]
        shares = [wait / one.e2e_s for wait, one in zip(waits, members, strict=True) if one.e2e_s > 0]
        ttft = [one.ttft_s for one in members if one.ttft_s is not None]
        figures[f"share_{name}"] = len(members) / len(records)
        if members:
            figures[f"queueing_{name}"], figures[f"queueing_share_{name}"] = _mean(waits), _mean(shares)
            figures[f"ttft_p99_{name}"] = float(np.quantile(ttft, 0.99))
    return figures


def _against_idle(records: Seq[RequestRecord], idle: Seq[IdleEngineTimes]) -> dict[str, float]:
    slowdowns = np.array(_slowdowns(records, idle))
    ttft = [one.ttft_s for one in records if one.ttft_s is not None]
    slo_s = 5.0 * _mean(one.e2e_s for one in idle)
    figures = {
        "alone_e2e_mean": _mean(one.e2e_s for one in idle),
        "alone_ttft_mean": _mean(one.ttft_s for one in idle),
        "slo_by_alone": slo_s,
    }
    if records:
        figures |= {
            "slowdown_p50": float(np.quantile(slowdowns, 0.5)),
            "slowdown_p99": float(np.quantile(slowdowns, 0.99)),
            "ttft_p99_in_slo": float(np.quantile(ttft, 0.99)) / slo_s,
        }
    return figures


def _slowdowns(records: Seq[RequestRecord], idle: Seq[IdleEngineTimes]) -> list[float]:
    return [one.e2e_s / idle[int(one.request_id)].e2e_s for one in records]


def _p99_over_time(records: Seq[RequestRecord]) -> Curve:
    bins: dict[int, list[float]] = {}
    for one in records:
        if one.ttft_s is not None:
            bins.setdefault(int(one.arrived_at / BIN_S), []).append(one.ttft_s)
    places = sorted(bins)
    return Curve(
        tuple((place + 0.5) * BIN_S for place in places),
        tuple(float(np.quantile(bins[place], 0.99)) for place in places),
    )


def _memory_over_time(run: Run, config: SimulationConfig) -> dict[str, Curve]:
    """Memory in GB over time, as it adds up: weights, then KV, then adapters."""
    timeline = run.timelines[0]
    page_gb = config.base.page.num_bytes / 1e9
    cost = config.cost
    weight_gb = cost.weight_bytes / 1e9 if isinstance(cost, RooflineCost) else 0.0
    at = np.asarray(timeline.at)
    kept = slice(None, None, max(1, len(at) // 200))
    weights = np.full(len(at), weight_gb)
    kv = weights + np.asarray(timeline.gauges["num_kv_pages"]) * page_gb
    adapters = kv + np.asarray(timeline.gauges["num_adapter_pages"]) * page_gb
    ends = np.full(len(at), weight_gb + config.num_pages * page_gb)
    columns = {"memory_weights": weights, "memory_kv": kv, "memory_adapters": adapters, "memory_all": ends}
    return {name: Curve(tuple(at[kept].tolist()), tuple(column[kept].tolist())) for name, column in columns.items()}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
