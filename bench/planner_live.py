"""Is a planned capacity that of the machine? The demo model on this processor: planned with a profile, then served.

A sweep measures what steps and loads take on the live engine, and a profile is fitted to it. With the profile the
planner searches for the highest rate at which nine of ten requests get their first token in time. Then the same engine
serves the same requests on the wall clock at rates around that one, gaps stretched as the planner stretches them; where
the percentile crosses the limit, by interpolation, is the capacity that the machine really has.

Run it: ``python bench/planner_live.py`` (a quiet machine, eight minutes) writes ``results/planner_live.json`` and
``.md``; ``--quick`` is a smoke test.
"""

from __future__ import annotations

import math
import platform
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from live_arrivals import live_arrivals
from publishing import arguments, publish

from manylora.bench.calibration import sweep_live
from manylora.bench.synthetic import write_synthetic_adapter
from manylora.clock import WallClock
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.costs.calibrate import fit_profile
from manylora.costs.step_log import LogLine
from manylora.demo import demo_model_path
from manylora.engine.core import EngineCore
from manylora.engine.loop import EngineLoop
from manylora.execution.build import build_parts
from manylora.measure import Recorder, RequestRecord, Slo
from manylora.planning import LoadTests, Objective, SearchBudget, TrafficDemand, make_plan
from manylora.planning.load_test import at_rate
from manylora.sim.run.simulation import simulate
from manylora.sim.scenario import Scenario
from manylora.sim.setup import Setup
from manylora.workloads import AdapterSet, Workload, WorkloadSpec, make_workload
from manylora.workloads.arrivals import PoissonArrivals
from manylora.workloads.distributions import ExponentialTokens
from manylora.workloads.lengths import ParametricLengths, TokenBounds
from manylora.workloads.popularity import ZipfShares

SHARES = (0.85, 0.95, 1.05, 1.2)
RANKS = (8, 16, 32)
NUM_ADAPTERS = 24
LIMIT_S, PERCENTILE = 0.4, 90.0
SCHEDULER = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)
MEMORY = MemoryConfig(memory_bytes=64 << 20, prefix_caching=False)
WORKLOAD = WorkloadSpec(
    name="demo",
    arrivals=PoissonArrivals(rate=1.0),
    lengths=ParametricLengths(
        prompt=ExponentialTokens(mean=120),
        output=ExponentialTokens(mean=40),
        bounds=TokenBounds(min_prompt=2, max_prompt=800, max_output=200),
    ),
    adapters=AdapterSet(count=NUM_ADAPTERS, ranks=RANKS),
    popularity=ZipfShares(),
)


@dataclass(slots=True)
class Served:
    """One rate, on the live engine and simulated.

    Args:
        share: Of the planned capacity.
        rate: Requests per second.
        simulated_s: The percentile of the time to first token that the planner expects of these requests.
        single_s: The same on the live engine, run by run.
        live_s: The same over all runs together.
    """

    share: float
    rate: float
    simulated_s: float
    single_s: list[float] = field(default_factory=list)
    live_s: float = 0.0


class Live:
    """The demo model, served on the wall clock in this process, one workload after the other."""

    def __init__(self, config: EngineConfig, adapters: Workload, folder: Path) -> None:
        self._clock = WallClock()
        self._parts = build_parts(config, self._clock)
        self._core = EngineCore.from_parts(self._parts, config, sinks=(self._take,))
        self._recorder = Recorder()
        rng = np.random.default_rng(0)
        for spec in adapters.adapters:
            place = write_synthetic_adapter(folder / spec.name, self._parts.base, spec.rank, rng, targets=spec.targets)
            version = self._parts.reader.read(spec.name, str(place))
            self._core.adapters.register(spec.name, version, self._clock.now())

    def _take(self, event: object) -> None:
        self._recorder(event)  # type: ignore[arg-type]

    def serve(self, workload: Workload) -> list[RequestRecord]:
        """Serve a workload to its end, and return its requests in order of arrival."""
        self._recorder = Recorder()
        arrivals = live_arrivals(workload, self._parts.base.vocab_size, self._clock.now() + 0.2)
        EngineLoop(self._core, self._clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
        return sorted(self._recorder.records, key=lambda record: int(record.request_id))

    def close(self) -> None:
        self._parts.close()


def crossing(served: list[Served]) -> float:
    """Return the rate at which the live percentile reaches the limit; times are interpolated by their logarithms."""
    for low, high in pairwise(served):
        if low.live_s <= LIMIT_S < high.live_s:
            share = math.log(LIMIT_S / low.live_s) / math.log(high.live_s / low.live_s)
            return low.rate * math.pow(high.rate / low.rate, share)
    return math.inf if served[-1].live_s <= LIMIT_S else 0.0


def main() -> None:
    parser = arguments(__doc__, quick="seconds instead of minutes")
    parser.add_argument("--requests", type=int, default=500, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each rate")
    args = parser.parse_args()
    num_requests, rounds, sweep_s = (40, 1, 8.0) if args.quick else (args.requests, args.rounds, 75.0)
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu"),
        memory=MEMORY,
        scheduler=SCHEDULER,
        adapters=AdapterConfig(),
    )
    log: list[LogLine] = []
    targets = WORKLOAD.adapters.targets
    sweep_live(config, num_adapters=NUM_ADAPTERS, ranks=RANKS, targets=targets, seconds=sweep_s, write=log.append)
    profile = fit_profile(log, command="bench/planner_live.py")
    objective = Objective(slo=Slo(ttft_s=LIMIT_S), percentile=PERCENTILE)
    with tempfile.TemporaryDirectory(prefix="manylora-") as name:
        folder = Path(name)
        profile.write(folder / "profile.json")
        setup = Setup(profile=str(folder / "profile.json"), scheduler=SCHEDULER, exact_caps=True)
        scenario = Scenario(workload=WORKLOAD, setup=setup)
        search_budget = SearchBudget(num_requests=num_requests, seeds=rounds, spans=0.0)
        plan = make_plan(scenario, objective, TrafficDemand(search_budget=search_budget))
        planned, load_tests = plan.capacity.rate, LoadTests(scenario, objective, search_budget)
        print(f"planned: {planned:.2f} req/s; binds: {plan.binds}", flush=True)
        served = [Served(share, share * planned, expect(load_tests, share * planned, rounds)) for share in SHARES]
        live = Live(config, load_tests.workload(planned), folder)
        try:
            live.serve(make_workload(replace(at_rate(WORKLOAD, 0.5 * planned), num_requests=30), 99))  # warm up
            serve(live, load_tests, objective, served, rounds)
        finally:
            live.close()
    found = crossing(served)
    text = report(planned, found, served, profile.machine, plan.most_per_s)
    figures = {
        "planned_requests_per_s": planned,
        "live_requests_per_s": found if math.isfinite(found) else None,
        "limit_s": LIMIT_S,
        "percentile": PERCENTILE,
        "served": [asdict(one) for one in served],
        "fit": [{"regime": one.regime, "median_error": one.median_error} for one in profile.errors],
        "machine": profile.machine,
    }
    publish("planner_live", figures, text, is_kept=not args.quick)


def expect(load_tests: LoadTests, rate: float, rounds: int) -> float:
    """Return the percentile that simulation gives the requests which the live engine is going to serve, in seconds."""
    counted: list[RequestRecord] = []
    for number in range(rounds):
        records = simulate(load_tests.workload(rate, seed=number), load_tests.config(seed=number)).records
        counted += records[len(records) // 10 :]
    return load_tests.objective.measure(counted)["ttft"]


def serve(live: Live, load_tests: LoadTests, objective: Objective, served: list[Served], rounds: int) -> None:
    """Serve every rate in every round, the rates in turn, so that a machine that is slow for a while hits them all."""
    counted: list[list[RequestRecord]] = [[] for _ in served]
    for number in range(rounds):
        for one, kept in zip(served, counted, strict=True):
            records = live.serve(load_tests.workload(one.rate, seed=number))
            kept += records[len(records) // 10 :]
            one.single_s.append(objective.measure(records[len(records) // 10 :])["ttft"])
            print(f"{one.share:g} of it: {one.single_s[-1]:.3f} s, expected {one.simulated_s:.3f} s", flush=True)
    for one, kept in zip(served, counted, strict=True):
        one.live_s = objective.measure(kept)["ttft"]


def report(planned: float, found: float, served: list[Served], machine: str, most: float) -> str:
    if 0 < found < math.inf:
        verdict = f"{found:.2f} req/s; the plan is off by {planned / found - 1:+.1%}"
    else:
        verdict = "below all rates that were served" if found == 0 else "above all rates that were served"
    ranks = ", ".join(map(str, RANKS))
    lines = [
        "# Planned capacity against the live engine",
        "",
        f"Command: `python bench/planner_live.py`, on {machine}, Python {platform.python_version()}. The demo model on "
        f"CPU, {NUM_ADAPTERS} adapters of rank {ranks}; {len(served[0].single_s)} runs at each rate.",
        "",
        f"SLO: P{PERCENTILE:g} of time to first token within {LIMIT_S:g} s. Planned capacity {planned:.2f} req/s "
        f"(never idle: {most:.2f}); live, by interpolation: {verdict}.",
        "",
        f"| of planned capacity | req/s | P{PERCENTILE:g} simulated | live | live, run by run |",
        "|---|---|---|---|---|",
        *(
            f"| {one.share:g} | {one.rate:.2f} | {one.simulated_s:.3f} s | {one.live_s:.3f} s "
            f"| {', '.join(f'{value:.3f} s' for value in one.single_s)} |"
            for one in served
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
