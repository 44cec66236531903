"""Is a planned capacity that of the machine? The demo model on this processor: planned with a profile, then served.

A sweep measures what steps and loads take on the live engine, and a profile is fitted to it. With the profile the
planner searches for the highest rate at which nine of ten requests get their first token in time. Then the same engine
serves the same requests on the wall clock at rates around that one, gaps stretched as the planner stretches them; where
the percentile of all rounds crosses the limit, by interpolation, is the capacity that the machine really has. Its 95 %
interval resamples rounds.

Run it: ``python bench/planner_live.py`` (a quiet machine, fourteen minutes) writes ``results/planner_live.json`` and
``.md``; ``--quick`` is a smoke test.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from live import live_arrivals
from publishing import Others, arguments, publish, reason_to_refuse

from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LoadRecord, LoggedExecutor, LogLine, StepRecord
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.demo import demo_model_path
from manylora.execution.build import build_parts
from manylora.lab.bench.rounds import in_turns
from manylora.lab.bench.sweep import sweep_live, write_synthetic_adapter
from manylora.lab.costs.calibrate import fit_profile
from manylora.lab.experiments.findings import crossing
from manylora.lab.measure import Recorder, RequestRecord, Slo
from manylora.lab.planning.load_test import LoadTests, Objective, SearchBudget, at_rate
from manylora.lab.planning.plan import TrafficDemand, make_plan
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.scenario import Scenario
from manylora.lab.sim.setup import Setup
from manylora.lab.workloads import AdapterSet, Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import PoissonArrivals
from manylora.lab.workloads.lengths import ExponentialTokens, ParametricLengths, TokenBounds
from manylora.lab.workloads.popularity import ZipfShares

SHARES = (0.85, 0.95, 1.05, 1.2)
RANKS = (8, 16, 32)
NUM_ADAPTERS = 24
LIMIT_S, PERCENTILE = 0.4, 90.0
RESAMPLES = 2000
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
        live_s: Times to first token on the live engine, by round.
    """

    share: float
    rate: float
    simulated_s: float
    live_s: list[list[float]] = field(default_factory=list)


class Live:
    """The demo model, served on the wall clock in this process, one workload after the other.

    Args:
        config: The engine.
        adapters: A workload with the adapters that it serves.
        folder: Where their files are written.
        write: Receives the log of steps and loads, if given.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapters: Workload,
        folder: Path,
        write: Callable[[StepRecord | LoadRecord], None] | None = None,
    ) -> None:
        self._clock = WallClock()
        self._parts = build_parts(config, self._clock)
        executor = self._parts.executor if write is None else LoggedExecutor(self._parts.executor, write)
        self._core = EngineCore(replace(self._parts, executor=executor), config, sinks=(self._take,))
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


def capacity(served: list[Served], rounds: Sequence[int]) -> float | None:
    """Return the rate at which the live percentile of these rounds reaches the limit; ``None`` outside all rates."""
    pooled = [np.concatenate([one.live_s[number] for number in rounds]) for one in served]
    places = [(one.rate, float(np.percentile(all_s, PERCENTILE))) for one, all_s in zip(served, pooled, strict=True)]
    return crossing(places, LIMIT_S)


def capacities(served: list[Served]) -> list[float] | None:
    """Return the live capacity and the ends of its interval; ``None`` if a resampling of rounds has none."""
    rng, num_rounds = np.random.default_rng(0), len(served[0].live_s)
    drawn = [capacity(served, rng.integers(num_rounds, size=num_rounds).tolist()) for _ in range(RESAMPLES)]
    found = [one for one in drawn if one is not None]
    middle = capacity(served, range(num_rounds))
    if middle is None or len(found) < len(drawn):
        return None
    return [middle, *np.percentile(found, [2.5, 97.5]).tolist()]


def main() -> None:
    parser = arguments(__doc__, quick="seconds instead of minutes")
    parser.add_argument("--requests", type=int, default=300, help="of each run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each rate")
    args = parser.parse_args()
    num_requests, rounds, sweep_s = (40, 1, 8.0) if args.quick else (args.requests, args.rounds, 75.0)
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu"),
        memory=MEMORY,
        scheduler=SCHEDULER,
        adapters=AdapterConfig(),
    )
    log: list[LogLine] = []
    others = Others()
    targets = WORKLOAD.adapters.targets
    sweep_live(
        build_parts, config, num_adapters=NUM_ADAPTERS, ranks=RANKS, targets=targets, seconds=sweep_s, write=log.append
    )
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
            serve(live, load_tests, served, rounds)
        finally:
            live.close()
    found, busy_share = capacities(served), others.share()
    text = report(planned, found, served, profile.machine, plan.most_per_s, busy_share)
    figures = {
        "planned_requests_per_s": planned,
        "live_requests_per_s": found,
        "busy_share": busy_share,
        "limit_s": LIMIT_S,
        "percentile": PERCENTILE,
        "served": [asdict(one) for one in served],
        "fit": [{"regime": one.regime, "median_error": one.median_error} for one in profile.errors],
        "machine": profile.machine,
    }
    publish("planner_live", figures, text, is_kept=not args.quick, refused=reason_to_refuse(rounds, busy_share))


def expect(load_tests: LoadTests, rate: float, rounds: int) -> float:
    """Return the percentile that simulation gives the requests which the live engine is going to serve, in seconds."""
    counted: list[RequestRecord] = []
    for number in range(rounds):
        records = simulate(load_tests.workload(rate, seed=number), load_tests.config(seed=number)).records
        counted += records[len(records) // 10 :]
    return load_tests.objective.measure(counted)["ttft"]


def serve(live: Live, load_tests: LoadTests, served: list[Served], rounds: int) -> None:
    """Serve every rate in every round, the rates in turn, so that a machine that is slow for a while hits them all."""
    for number, name in in_turns([str(place) for place in range(len(served))], rounds, num_warm_up=0):
        one = served[int(name)]
        records = live.serve(load_tests.workload(one.rate, seed=number))
        one.live_s.append([record.ttft_s for record in records[len(records) // 10 :] if record.ttft_s is not None])
        found_s = float(np.percentile(one.live_s[-1], PERCENTILE))
        print(f"{one.share:g} of it: {found_s:.3f} s, expected {one.simulated_s:.3f} s", flush=True)


def report(
    planned: float, found: list[float] | None, served: list[Served], machine: str, most: float, busy_share: float
) -> str:
    if found is None:
        verdict = "not between the rates that were served in every resampling"
    else:
        middle, low, high = found
        verdict = f"{middle:.2f} req/s ({low:.2f} to {high:.2f}); the plan is off by {planned / middle - 1:+.1%}"
    ranks = ", ".join(map(str, RANKS))
    lines = [
        "# Planned capacity against the live engine",
        "",
        f"Command: `python bench/planner_live.py`, on {machine}, Python {platform.python_version()}. The demo model on "
        f"CPU, {NUM_ADAPTERS} adapters of rank {ranks}; {len(served[0].live_s)} runs at each rate, and an interval of "
        f"95 % over them. Other processes took {busy_share:.1%} of the machine's processor time.",
        "",
        f"SLO: P{PERCENTILE:g} of time to first token within {LIMIT_S:g} s. Planned capacity {planned:.2f} req/s "
        f"(never idle: {most:.2f}); live, by interpolation: {verdict}.",
        "",
        f"| of planned capacity | req/s | P{PERCENTILE:g} simulated | live | live, run by run |",
        "|---|---|---|---|---|",
        *(
            f"| {one.share:g} | {one.rate:.2f} | {one.simulated_s:.3f} s "
            f"| {np.percentile(np.concatenate(one.live_s), PERCENTILE):.3f} s "
            f"| {', '.join(f'{np.percentile(run, PERCENTILE):.3f} s' for run in one.live_s)} |"
            for one in served
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
