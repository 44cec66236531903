"""What a load test used: memory by owner, the device's time, the link; and what it would have needed more of.

*What binds* is read off the runs, by rules that are written here and nowhere else. If the tightest limit is about the
time between tokens, steps are too long, and the largest part of a step binds. Otherwise requests were late because they
waited; samples of the engine say for which resource, each weighted by the number that waited::

    seats     as many sequences ran as may
    memory    a request's pages were not to be had, even from idle adapters and prefixes
    link      neither; and more of the time to first token went to adapters on their way than the device was busy
    device    none of these: what takes most of a step binds (compute, bandwidth, adapters, network, host)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manylora.costs.roofline import RooflineCost
from manylora.measure import Timeline, summarise
from manylora.planning.load_test import LoadTest, LoadTestRun
from manylora.planning.meter import PARTS
from manylora.planning.slo import Objective
from manylora.types import Tier

__all__ = ["OWNERS", "MemoryUse", "Usage", "usage_of", "what_binds"]

OWNERS = ("kv", "prefixes", "adapters", "free")
"""Who has the pages of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one replica, all of its devices together, in bytes.

    Args:
        weights: The base model's; ``None`` where a measured profile does not say.
        pool: All pages.
        mean: By owner, over time.
        highest: By owner, each at its own moment.
        over_time: Up to 200 moments of the first run: seconds, then bytes by owner.
    """

    weights: int | None
    pool: int
    mean: dict[str, float]
    highest: dict[str, float]
    over_time: dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a load test used; means over its runs and replicas.

    Args:
        memory: By owner.
        hit_rate: Share of requests for an adapter that found it on the device; ``None`` without adapters.
        device_busy: Share of time in which a step ran.
        link_busy: Share of time in which an adapter was copied to the device.
        adapter_wait: Share of all time to first token in which a request waited for nothing but its adapter.
        preempted: Share of requests that had to give their pages back.
        mean_running: Sequences in a step.
        step_parts: Share of each part in the time of steps; empty where they are unknown.
        prompt_tokens_per_s: Prompt tokens of requests that ended well, all replicas together.
        output_tokens_per_s: Tokens they got.
        waited_for: Share of each reason in all waiting that was seen: ``seats``, ``memory`` and ``device``.
    """

    memory: MemoryUse
    hit_rate: float | None
    device_busy: float
    link_busy: float
    adapter_wait: float
    preempted: float
    mean_running: float
    step_parts: dict[str, float]
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    waited_for: dict[str, float]


def usage_of(load_test: LoadTest) -> Usage:
    """Return what a load test used, given one that was not given up."""
    assert load_test.runs, "a load test that was given up has no runs"
    timelines = [timeline for one in load_test.runs for timeline in one.run.timelines]
    time_s = sum(one.run.duration_s * len(one.run.timelines) for one in load_test.runs)
    counted = [record for one in load_test.runs for record in one.counted]
    seconds = sum(_counted_s(one) for one in load_test.runs)
    good = [record for record in counted if record.error is None]
    num_steps = sum(len(timeline.steps.at) for timeline in timelines)
    looked_at = [record.was_resident for record in counted if record.was_resident is not None]
    return Usage(
        memory=_memory(load_test),
        hit_rate=sum(looked_at) / len(looked_at) if looked_at else None,
        device_busy=sum(sum(timeline.steps.took_s) for timeline in timelines) / time_s,
        link_busy=sum(sum(timeline.loads[Tier.DEVICE].busy_s) for timeline in timelines) / time_s,
        adapter_wait=summarise(counted).adapter_wait_share,
        preempted=sum(record.num_preemptions > 0 for record in counted) / len(counted),
        mean_running=sum(sum(timeline.steps.num_sequences) for timeline in timelines) / max(1, num_steps),
        step_parts=_parts(load_test.runs),
        prompt_tokens_per_s=sum(record.num_prompt_tokens for record in good) / seconds,
        output_tokens_per_s=sum(record.num_output_tokens for record in good) / seconds,
        waited_for=_waited_for(load_test.runs),
    )


def what_binds(load_test: LoadTest, usage: Usage, objective: Objective) -> str:
    """Return what a service would need more of: ``seats``, ``memory``, ``link``, or a part of a step's time."""
    if objective.tightest(load_test.measured) not in ("tbt", "tpot"):
        most = max(usage.waited_for, key=lambda name: usage.waited_for[name]) if usage.waited_for else "device"
        if most != "device":
            return most
        if usage.adapter_wait > usage.device_busy:
            return "link"
    parts = usage.step_parts
    return max(parts, key=lambda name: parts[name]) if parts else "device"


def _counted_s(one: LoadTestRun) -> float:
    """Return the seconds in which the counted requests arrived, which is what rates refer to."""
    arrivals = [record.arrived_at for record in one.counted]
    return max(1e-9, (max(arrivals) - min(arrivals)) * len(arrivals) / max(1, len(arrivals) - 1))


def _parts(runs: Sequence[LoadTestRun]) -> dict[str, float]:
    totals = {name: sum(one.meter.parts_s[name] for one in runs) for name in PARTS}
    whole = sum(totals.values())
    return {name: seconds / whole for name, seconds in totals.items()} if whole else {}


def _gauges(timeline: Timeline, *names: str) -> list[NDArray[np.float64]]:
    return [np.asarray(timeline.gauges[name]) for name in names]


def _waited_for(runs: Sequence[LoadTestRun]) -> dict[str, float]:
    """Return what waiting requests lacked when the engine was looked at, as shares of all waiting."""
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
            # Pages of resident but unused adapters could be taken as well; adapters are taken to be alike in size.
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
    for timeline in _timelines(load_test.runs):
        for owner, gauge in zip(OWNERS, _gauges(timeline, *columns), strict=True):
            samples[owner].append(gauge * page_bytes)
    joined = {owner: np.concatenate(parts) for owner, parts in samples.items()}
    first = load_test.runs[0].run.timelines[0]
    kept = slice(None, None, max(1, -(-len(first.at) // 200)))
    over_time = {"seconds": np.asarray(first.at)[kept].tolist()}
    over_time |= {owner: parts[0][kept].tolist() for owner, parts in samples.items()}
    cost = load_test.runs[0].meter.cost
    return MemoryUse(
        weights=cost.dims.weight_bytes if isinstance(cost, RooflineCost) else None,
        pool=config.num_pages * page_bytes,
        mean={owner: float(values.mean()) if len(values) else 0.0 for owner, values in joined.items()},
        highest={owner: float(values.max(initial=0.0)) for owner, values in joined.items()},
        over_time=over_time,
    )


def _timelines(runs: Iterable[LoadTestRun]) -> Iterable[Timeline]:
    return (timeline for one in runs for timeline in one.run.timelines)
