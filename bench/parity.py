"""One trace, live and simulated: do they decide alike, and do their latencies agree?

    python bench/parity.py [--quick]

An 82M-parameter Llama with random weights on the CPU and 50 synthetic adapters over a pool too small for them: adapters
are evicted and reloaded, some from disk, and sequences are pre-empted. A cost profile is fitted from two calibration
sweeps, one before and one after the live run, whose steps the profile never sees. Arrivals are Poisson at 80 % of the
capacity that the simulator finds. The live engine then serves them by the wall clock, and the simulator the same
arrivals with the profile. Three comparisons:

* *replayed*: the simulator is fed the live run's own step and load times. Every event must be the same: one code path.
* *predicted*: it charges by the profile. Percentiles of time to first token and between tokens, and the decisions.
* the profile against the live run's steps, one by one: what of the difference is the price of steps.

What *predicted* may know of the machine comes in columns (`parity_columns.py`), from mean prices to how slow it was at
every moment of the live run: what of an error is the machine's, and what the simulator's.

Writes `bench/results/parity.json`, `.md` and `.png`, and the machine's speed over time as `parity-speed.png`.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from cpu_systems import VOCAB as VOCAB_SIZE
from cpu_systems import make_model
from parity_columns import COLUMNS, WITHOUT_CHANCE, Columns, Curve, plot_speed, speed_of
from parity_table import page
from publishing import RESULTS, arguments, publish
from replay import ReplayExecutor

from manylora.core.clock import Clock, VirtualClock, WallClock
from manylora.core.config import MIB, AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LoadRecord, LoggedExecutor, LogHeader, LogLine, StepRecord, write_step_log
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.engine.status import EngineStats
from manylora.core.events import AdapterEvicted, Event, RequestAdmitted, RequestArrived, RequestPreempted
from manylora.core.plan import PlannedSequence
from manylora.core.ports import EngineParts, Executor
from manylora.core.types import AdapterVersion, Request, SampledToken, SamplingParams, Tier
from manylora.execution.build import build_parts
from manylora.lab.bench.sweep import run_sweep, write_synthetic_adapter
from manylora.lab.costs.calibrate import fit_profile, predict_times
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.profile import CostProfile
from manylora.lab.measure import Recorder, Summary, summarise
from manylora.lab.measure.plots import can_plot, plot_latencies
from manylora.lab.measure.records import RequestRecord
from manylora.lab.sim.run.contents import synthetic_token
from manylora.lab.sim.run.executor import SimulatedExecutor

RANKS = (8, 16, 32, 64)
NUM_ADAPTERS = 50
NUM_SEEDS = 10
LOAD = 0.8

Records = dict[str, list[RequestRecord]]


@dataclass(frozen=True)
class Outcome:
    """What one run did."""

    events: list[Event]
    records: list[RequestRecord]
    stats: EngineStats

    @property
    def summary(self) -> Summary:
        return summarise(self.records)


class Bench:
    """The engine's parts and its adapters, and any number of cores over them."""

    def __init__(self, folder: Path, pool_bytes: int) -> None:
        self.clock = WallClock()
        make_model(folder / "base")
        self.config = EngineConfig(
            model=ModelConfig(model=str(folder / "base"), device="cpu"),
            memory=MemoryConfig(memory_bytes=pool_bytes),
            scheduler=SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=256),
            adapters=AdapterConfig(max_cpu_loras=NUM_ADAPTERS * 9 // 10),
        )
        self.parts = build_parts(self.config, self.clock)
        rng = np.random.default_rng(0)
        self.folders = [
            write_synthetic_adapter(folder / f"adapter-{index}", self.parts.base, RANKS[index % len(RANKS)], rng)
            for index in range(NUM_ADAPTERS)
        ]

    def read_adapters(self) -> list[AdapterVersion]:
        """Bring every adapter to host memory, as registering takes for granted."""
        return [self.parts.reader.read(folder.name, str(folder)) for folder in self.folders]

    def sweep(self, seconds: float, seed: int) -> list[LogLine]:
        """Calibrate; loads of both kinds happen all the time."""
        config = replace(
            self.config,
            memory=replace(self.config.memory, prefix_caching=False),
            adapters=replace(self.config.adapters, eviction="none"),
        )
        lines: list[LogLine] = [header(self.parts)]
        rng = random.Random(f"sweep/{seed}")
        run_sweep(
            self.parts, config, self.read_adapters(), clock=self.clock, rng=rng, seconds=seconds, write=lines.append
        )
        return lines

    def run(
        self,
        executor: Executor,
        clock: Clock,
        start_s: float,
        versions: Sequence[AdapterVersion],
        arrivals: Sequence[tuple[float, Request]],
    ) -> Outcome:
        """Serve the arrivals: live or simulated, this is all there is to it."""
        events: list[Event] = []
        recorder = Recorder()
        core = EngineCore(replace(self.parts, executor=executor), self.config, sinks=[events.append, recorder])
        for version, folder in zip(versions, self.folders, strict=True):
            core.adapters.register(folder.name, version, start_s)
        EngineLoop(core, clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
        core.check_integrity()
        return Outcome(events, recorder.records, core.stats())

    def simulate(
        self,
        cost: FittedCost,
        versions: Sequence[AdapterVersion],
        requests: Sequence[tuple[float, Request]],
    ) -> Outcome:
        executor = SimulatedExecutor(cost, vocab_size=VOCAB_SIZE, choose=choose, interference=cost.interference)
        return self.run(executor, VirtualClock(), 0.0, versions, requests)


def choose(part: PlannedSequence) -> SampledToken:
    return synthetic_token(part, VOCAB_SIZE)


def header(parts: EngineParts) -> LogHeader:
    return LogHeader(base=parts.base, num_pages=parts.num_pages, machine=parts.machine, reads_host=parts.reads_host)


def make_requests(count: int, rate: float) -> list[tuple[float, Request]]:
    """Make requests by a Poisson process; short ones many, adapters by Zipf's law."""
    rng = random.Random(11)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(NUM_ADAPTERS)]
    order = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)  # popularity has nothing to do with rank
    out, at = [], 0.0
    for index in range(count):
        num_prompt = min(256, max(4, round(rng.lognormvariate(3.6, 0.7))))
        num_output = min(160, max(2, round(rng.lognormvariate(3.2, 0.8))))
        adapter = order[rng.choices(range(NUM_ADAPTERS), weights)[0]]
        request = Request(
            request_id=f"r{index}",
            prompt=tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
            model=f"adapter-{adapter}" if rng.random() < 0.95 else "base",
        )
        out.append((at, request))
        at += rng.expovariate(rate)
    return out


def capacity(bench: Bench, profile: CostProfile, versions: Sequence[AdapterVersion], count: int) -> float:
    """Return requests per second when all are there at once: what a queue without end is worked off at."""
    requests = [(0.0, request) for _, request in make_requests(count, 1.0)]
    outcome = bench.simulate(FittedCost(profile), versions, requests)
    return count / max(record.finished_at for record in outcome.records)


def measure(
    num_requests: int, sweep_s: float, pool_bytes: int, logs: Path | None = None
) -> tuple[dict[str, Any], Records, dict[str, Curve]]:
    with tempfile.TemporaryDirectory(prefix="parity-") as place:
        tell("building the model and its adapters")
        bench = Bench(Path(place), pool_bytes)
        tell(f"first sweep, {sweep_s:.0f} s")
        before = bench.sweep(sweep_s, seed=0)
        versions = bench.read_adapters()
        rate = LOAD * capacity(bench, fit_profile(before), versions, num_requests)
        requests = make_requests(num_requests, rate)
        lines: list[LogLine] = []
        tell(f"serving {num_requests} requests in {requests[-1][0]:.0f} s and what the last take")
        load_average = os.getloadavg()[0]
        start_s = bench.clock.now()
        live = bench.run(
            LoggedExecutor(bench.parts.executor, lines.append),
            bench.clock,
            start_s,
            versions,
            [(start_s + at, request) for at, request in requests],
        )
        tell(f"second sweep, {sweep_s:.0f} s")
        after = bench.sweep(sweep_s, seed=1)
        bench.parts.close()
        if logs is not None:
            for name, log in (("before", before), ("live", [before[0], *lines]), ("after", after)):
                write_step_log(logs / f"{name}.jsonl", log)
        profile = fit_profile([*before, *after])
        replayed = replay(bench, live, lines, start_s, versions, {one.request_id: one for _, one in requests})
        makers = Columns(profile, [before[0], *lines], start_s, vocab_size=VOCAB_SIZE, choose=choose)
        columns: dict[str, list[Outcome]] = {}
        began_at = perf_counter()
        for name in COLUMNS:
            tell(f"simulating: {name}")
            num_seeds = 1 if name in WITHOUT_CHANCE else NUM_SEEDS
            columns[name] = [
                bench.run(makers.executor(name, seed), VirtualClock(), 0.0, versions, requests)
                for seed in range(num_seeds)
            ]
        simulated_in_s = (perf_counter() - began_at) / sum(map(len, columns.values()))
    figures = {
        "command": "python bench/parity.py",
        "machine": bench.parts.machine,
        "load_average_before": load_average,
        "adapters": NUM_ADAPTERS,
        "ranks": RANKS,
        "requests": num_requests,
        "requests_per_s": rate,
        "share_of_capacity": LOAD,
        "num_pages": bench.parts.num_pages,
        "live_s": max(record.finished_at for record in live.records) - start_s,
        "simulated_in_s": simulated_in_s,
        "calibration_steps": [sum(isinstance(line, StepRecord) for line in log) for log in (before, after)],
        "profile_errors": [{name: getattr(one, name) for name in one.__struct_fields__} for one in profile.errors],
        "steps": makers.step_errors(),
        "drift": drift(before, after),
        "components": {"sweeps": components(profile), "live": components(makers.whole)},
        "replayed": replayed,
        "latencies": latencies(live, columns),
        "counts": {name: counts(outcome) for name, (outcome, *_) in {"live": [live], **columns}.items()},
        "decisions": {name: decisions(live, outcome) for name, (outcome, *_) in columns.items()},
    }
    records = {name: outcome.records for name, (outcome, *_) in {"live": [live], **columns}.items()}
    speeds = {
        name: speed_of(profile, log).curve() for name, log in (("before", before), ("live", lines), ("after", after))
    }
    return figures, records, speeds


def components(profile: CostProfile) -> list[dict[str, float]]:
    found = profile.speed_drift.components if profile.speed_drift is not None else ()
    return [{"size": one.size, "length_s": one.length_s} for one in found]


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def replay(
    bench: Bench,
    live: Outcome,
    lines: Sequence[LogLine],
    start_s: float,
    versions: Sequence[AdapterVersion],
    requests: dict[str, Request],
) -> dict[str, int]:
    """Run the live run again from its own times; count the events that are the same."""
    arrivals = [(one.at, requests[one.request_id]) for one in live.events if isinstance(one, RequestArrived)]
    again = bench.run(ReplayExecutor(lines, choose), VirtualClock(start_s), start_s, versions, arrivals)
    same = sum(ours == theirs for ours, theirs in zip(again.events, live.events, strict=False))
    return {"events": len(live.events), "same": same}


def drift(before: Sequence[LogLine], after: Sequence[LogLine]) -> float:
    """Return by how much steps of the second sweep were slower than the first's profile says: the machine, not us."""
    steps = [line for line in after if isinstance(line, StepRecord)]
    loads = [line for line in after if isinstance(line, LoadRecord)]
    measured = np.array([step.took_s for step in steps])
    return float(np.median(measured / predict_times(fit_profile(before), steps, loads)))


def latencies(live: Outcome, columns: Mapping[str, Sequence[Outcome]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return each percentile live, and by column its median over seeds, its range, and the error of the median."""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for what in ("ttft", "tbt", "e2e"):
        out[what] = {}
        for at in ("p50", "p90", "p99", "mean"):
            measured = figure(live, what, at)
            out[what][at] = {"live": measured, "columns": {}}
            for name, outcomes in columns.items():
                found = [figure(one, what, at) for one in outcomes]
                out[what][at]["columns"][name] = {
                    "middle": statistics.median(found),
                    "low": min(found),
                    "high": max(found),
                    "error": statistics.median(found) / measured - 1,
                    "seeds_below_live": statistics.mean(one < measured for one in found),
                }
    return out


def figure(outcome: Outcome, what: str, at: str) -> float:
    return float(getattr(getattr(outcome.summary, what), at))


def counts(outcome: Outcome) -> dict[str, float]:
    stats, summary = outcome.stats, outcome.summary
    return {
        "steps": stats.num_steps,
        "copies to the device": stats.num_loads,
        "reads from disk": stats.num_disk_loads,
        "evictions of adapters": stats.num_evictions,
        "evicted prefix pages": stats.num_prefix_evictions,
        "pre-emptions": stats.num_preemptions,
        "prefetches": stats.num_prefetches,
        "adapters found on the device": round(summary.hit_rate or 0.0, 4),
        "tokens per second": round(summary.output_tokens_per_s, 2),
    }


def decisions(live: Outcome, other: Outcome) -> dict[str, float]:
    """Say how alike two runs decided; 1 is the same throughout."""

    def order(outcome: Outcome) -> list[str]:
        return [event.request_id for event in outcome.events if isinstance(event, RequestAdmitted)]

    def hits(outcome: Outcome) -> dict[str, bool]:
        return {
            event.request_id: event.adapter_was_resident
            for event in outcome.events
            if isinstance(event, RequestAdmitted) and event.adapter is not None
        }

    ours, theirs = order(live), order(other)
    place = {request_id: index for index, request_id in enumerate(theirs)}
    ranks = np.array([place[request_id] for request_id in ours], dtype=float)
    one, two = hits(live), hits(other)
    evicted = [evictions(outcome) for outcome in (live, other)]
    preempted = [preemptions(outcome) for outcome in (live, other)]
    return {
        "order of admissions, rank correlation": float(np.corrcoef(np.arange(len(ranks)), ranks)[0, 1]),
        "admissions at the same place": float(np.mean(ranks == np.arange(len(ranks)))),
        "requests that found their adapter in both or in neither": statistics.mean(one[key] == two[key] for key in one),
        "evictions of the same adapters": overlap(*evicted),
        "pre-empted in both, of pre-empted in either": len(preempted[0] & preempted[1])
        / max(1, len(preempted[0] | preempted[1])),
    }


def evictions(outcome: Outcome) -> Counter[str]:
    found = (one for one in outcome.events if isinstance(one, AdapterEvicted) and one.tier is Tier.DEVICE)
    return Counter(one.adapter for one in found)


def preemptions(outcome: Outcome) -> set[str]:
    return {event.request_id for event in outcome.events if isinstance(event, RequestPreempted)}


def overlap(one: Counter[Any], two: Counter[Any]) -> float:
    return (one & two).total() / max(1, (one | two).total())


def main() -> None:
    parser = arguments(__doc__, quick="60 requests, short sweeps")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--sweep", type=float, default=75.0, help="seconds of each of the two calibration sweeps")
    parser.add_argument("--pool", type=int, default=280, help="the pool, in MiB")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the step logs there")
    options = parser.parse_args()
    num_requests, sweep_s = (60, 20.0) if options.quick else (options.requests, options.sweep)
    figures, records, speeds = measure(num_requests, sweep_s, options.pool * MIB, options.logs)
    publish("parity", figures, page(figures), is_kept=not options.quick)
    if not options.quick and can_plot():
        shown = ("live", "mean prices", "drift", "speed replayed")
        plot_latencies({name: records[name] for name in shown}, RESULTS / "parity.png")
        plot_speed(speeds, RESULTS / "parity-speed.png")


if __name__ == "__main__":
    main()
