"""Resource usage of a load test (memory by owner, device, link), and the bottleneck.

If the tightest limit is on the time between tokens, steps are too long, and the largest part of a step is the
bottleneck. Otherwise requests were late because they waited. Samples of the engine show for which resource, each
weighted by the number of waiting requests::

    seats     max_num_seqs sequences were running
    memory    a request's pages could not be allocated, even by evicting idle adapters and prefixes
    link      neither; and the share of time to first token spent on loading exceeds the device's busy share
    device    none of these: the largest part of a step is the bottleneck (compute, bandwidth, adapters, network, host)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manylora.core.types import Tier
from manylora.lab.costs.roofline import PARTS, RooflineCost
from manylora.lab.measure import Timeline, summarise
from manylora.lab.planning.load_test import LoadTest, LoadTestRun, Objective

__all__ = ["OWNERS", "LoadTestUsage", "MemoryUse", "bottleneck_of", "usage_of"]

OWNERS = ("kv", "prefixes", "adapters", "free")  # owners of pages


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one replica, all of its devices together, in bytes."""

    weights: int | None  # the base model's; ``None`` under a measured profile, which has no sizes
    pool: int  # all pages
    mean: dict[str, float]  # mean over time, by owner
    highest: dict[str, float]  # maximum by owner; maxima may be at different times
    over_time: dict[str, list[float]]  # up to 200 moments of the first run: seconds, then bytes by owner


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestUsage:
    """Usage of a load test; means over its runs and replicas."""

    memory: MemoryUse
    hit_rate: float | None  # share of requests for an adapter that found it on the device; ``None`` without adapters
    device_busy: float  # share of time in which a step ran
    link_busy: float  # share of time in which an adapter was copied to the device
    adapter_wait: float  # share of all time to first token in which a request waited for nothing but its adapter
    preempted: float  # share of requests that were pre-empted
    mean_running: float
    step_parts: dict[str, float]  # share of each part in the time of steps; empty where they are unknown
    prompt_tokens_per_s: float  # prompt tokens of successful requests, all replicas together; output tokens likewise
    output_tokens_per_s: float
    # Share of each reason (``seats``, ``memory``, ``device``) in all samples of waiting requests.
    waited_for: dict[str, float]


def usage_of(load_test: LoadTest) -> LoadTestUsage:
    """Return the usage of a load test that ran to its end."""
    assert load_test.runs, "a load test that was given up has no runs"
    timelines = [timeline for one in load_test.runs for timeline in one.run.timelines]
    time_s = sum(one.run.duration_s * len(one.run.timelines) for one in load_test.runs)
    counted = [record for one in load_test.runs for record in one.counted]
    seconds = sum(_counted_s(one) for one in load_test.runs)
    good = [record for record in counted if record.error is None]
    num_steps = sum(len(timeline.steps.took_s) for timeline in timelines)
    summary = summarise(counted)
    return LoadTestUsage(
        memory=_memory(load_test),
        hit_rate=summary.hit_rate,
        device_busy=sum(sum(timeline.steps.took_s) for timeline in timelines) / time_s,
        link_busy=sum(sum(timeline.loads[Tier.DEVICE].busy_s) for timeline in timelines) / time_s,
        adapter_wait=summary.adapter_wait_share,
        preempted=summary.preempted_share,
        mean_running=sum(sum(timeline.steps.num_sequences) for timeline in timelines) / max(1, num_steps),
        step_parts=_parts(load_test.runs),
        prompt_tokens_per_s=sum(record.num_prompt_tokens for record in good) / seconds,
        output_tokens_per_s=sum(record.num_output_tokens for record in good) / seconds,
        waited_for=_waited_for(load_test.runs),
    )


def bottleneck_of(load_test: LoadTest, usage: LoadTestUsage, objective: Objective) -> str:
    """Return the bottleneck: ``seats``, ``memory``, ``link``, or a part of a step's time."""
    if objective.tightest(load_test.measured) not in ("tbt", "tpot"):
        most = max(usage.waited_for, key=lambda name: usage.waited_for[name]) if usage.waited_for else "device"
        if most != "device":
            return most
        if usage.adapter_wait > usage.device_busy:
            return "link"
    parts = usage.step_parts
    return max(parts, key=lambda name: parts[name]) if parts else "device"


def _counted_s(one: LoadTestRun) -> float:
    """Return the seconds in which the counted requests arrived, to which rates refer."""
    arrivals = [record.arrived_at for record in one.counted]
    return max(1e-9, (max(arrivals) - min(arrivals)) * len(arrivals) / max(1, len(arrivals) - 1))


def _parts(runs: Sequence[LoadTestRun]) -> dict[str, float]:
    totals = {name: sum(one.meter.parts_s[name] for one in runs) for name in PARTS}
    whole = sum(totals.values())
    return {name: seconds / whole for name, seconds in totals.items()} if whole else {}


def _gauges(timeline: Timeline, *names: str) -> list[NDArray[np.float64]]:
    return [np.asarray(timeline.gauges[name]) for name in names]


def _waited_for(runs: Sequence[LoadTestRun]) -> dict[str, float]:
    """Return the resource that waiting requests lacked in samples of the engine, as shares of all waiting."""
    lacked = dict.fromkeys(("seats", "memory", "device"), 0.0)
    for one in runs:
        needs = [record.num_prompt_tokens for record in one.counted]
        pages = sum(needs) / max(1, len(needs)) / one.config.base.page.block_size
        for timeline in one.run.timelines:
            running, waiting, free, prefix, adapters, resident, active = _gauges(
                timeline,
                "num_running",
                "num_waiting",
                "num_free_pages",
                "num_prefix_pages",
                "num_adapter_pages",
                "num_resident",
                "num_active",
            )
            # Pages of resident but unused adapters could be evicted as well; adapters are assumed to be of one size.
            idle = adapters * (1 - active / np.maximum(1, resident))
            seats = running >= one.config.scheduler.max_num_seqs
            memory = ~seats & (free + prefix + idle < pages)
            lacked["seats"] += float(waiting[seats].sum())
            lacked["memory"] += float(waiting[memory].sum())
            lacked["device"] += float(waiting[~seats & ~memory].sum())
    whole = sum(lacked.values())
    return {name: value / whole for name, value in lacked.items()} if whole else {}


def _memory(load_test: LoadTest) -> MemoryUse:
    config = load_test.runs[0].config
    page_bytes = config.base.page.num_bytes
    columns = ("num_kv_pages", "num_prefix_pages", "num_adapter_pages", "num_free_pages")
    samples: dict[str, list[NDArray[np.float64]]] = {owner: [] for owner in OWNERS}
    for one in load_test.runs:
        for timeline in one.run.timelines:
            for owner, gauge in zip(OWNERS, _gauges(timeline, *columns), strict=True):
                samples[owner].append(gauge * page_bytes)
    joined = {owner: np.concatenate(parts) for owner, parts in samples.items()}
    first = load_test.runs[0].run.timelines[0]
    kept = slice(None, None, max(1, -(-len(first.at) // 200)))
    over_time = {"seconds": np.asarray(first.at)[kept].tolist()}
    over_time |= {owner: parts[0][kept].tolist() for owner, parts in samples.items()}
    cost = load_test.runs[0].meter.cost
    return MemoryUse(
        weights=cost.weight_bytes if isinstance(cost, RooflineCost) else None,
        pool=config.num_pages * page_bytes,
        mean={owner: float(values.mean()) if len(values) else 0.0 for owner, values in joined.items()},
        highest={owner: float(values.max(initial=0.0)) for owner, values in joined.items()},
        over_time=over_time,
    )
