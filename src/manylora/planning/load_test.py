"""One rate, tried: the workload at that rate, served in virtual time by the engine that serves, and judged.

A search tries the same workload at many rates: with the same seeds, and so many requests, it is the same requests with
all gaps stretched alike, so that two rates differ by their rate and by nothing else. A load test that can no longer
meet its SLO is given up, which is what makes hopeless rates cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from manylora.costs.model import CostModel
from manylora.errors import ConfigError
from manylora.events import Event, RequestFinished
from manylora.measure import RequestRecord
from manylora.planning.meter import Meter
from manylora.planning.slo import Objective
from manylora.sim.run.simulation import Run, SimulationConfig, simulate
from manylora.sim.scenario import Scenario
from manylora.workloads import Workload, WorkloadSpec, make_workload
from manylora.workloads.arrivals import Arrivals
from manylora.workloads.modulated import StepArrivals

__all__ = ["LoadTest", "LoadTestRun", "LoadTests", "SearchBudget", "at_rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """How much a load test takes.

    Args:
        num_requests: Requests of a run, and replica, at least.
        seeds: Runs of a load test; their requests are judged together.
        warm_up: Share of a run's requests that come first and are not counted: caches begin empty.
        spans: A run lasts at least that many times the longest objective: a rate that is a little too high shows only
            when the queue has had the time to grow.
    """

    num_requests: int = 2000
    seeds: int = 2
    warm_up: float = 0.1
    spans: float = 30.0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"Got {name} = {getattr(self, name)!r}, expected {expected}")

        check(self.num_requests >= 10, "num_requests", "at least 10 in a run")
        check(self.seeds >= 1, "seeds", "at least 1")
        check(0 <= self.warm_up < 1, "warm_up", "a share in [0, 1)")
        check(self.spans >= 0, "spans", "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestRun:
    """One run of a load test.

    Args:
        run: What came of it.
        counted: Its requests without those of the warm-up.
        meter: What the device did.
        config: What served.
    """

    run: Run
    counted: list[RequestRecord]
    meter: Meter
    config: SimulationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """What came of a rate.

    Args:
        rate: Requests per second.
        num_replicas: Replicas that shared them.
        is_kept: Whether every objective was kept.
        measured: Each promised time at its percentile, in seconds; infinite in a load test that was given up.
        runs: The runs; empty in a load test that was given up.
    """

    rate: float
    num_replicas: int
    is_kept: bool
    measured: dict[str, float]
    runs: tuple[LoadTestRun, ...] = ()


def at_rate(spec: WorkloadSpec, rate: float) -> WorkloadSpec:
    """Return a workload's description with another rate, in requests per second.

    Raises:
        ConfigError: Its arrivals have no rate.
    """
    arrivals = spec.arrivals
    changed: Arrivals
    if isinstance(arrivals, StepArrivals):
        factor = rate * len(arrivals.rates) / sum(arrivals.rates)
        changed = replace(arrivals, rates=tuple(factor * one for one in arrivals.rates))
    elif "rate" in getattr(arrivals, "__dataclass_fields__", {}):
        changed = replace(arrivals, rate=rate)  # type: ignore[type-var]
    else:
        raise ConfigError(f"Arrivals of kind {arrivals.kind!r} have no rate to search for")
    return replace(spec, arrivals=changed)


class _GivenUp(Exception):
    """So many requests are late already that the objective cannot be kept."""


class LoadTests:
    """Tries rates of one scenario.

    Args:
        scenario: Who asks and what serves; its workload's rate and number of requests are not looked at.
        objective: What is promised.
        search budget: How much a load test takes.
        cost: Prices of steps and loads; by default those of the scenario's setup.
        on_run: Told of each run before it begins, as words for people.
    """

    def __init__(
        self,
        scenario: Scenario,
        objective: Objective,
        search_budget: SearchBudget,
        *,
        cost: CostModel | None = None,
        on_run: Callable[[str], None] | None = None,
    ) -> None:
        self.scenario = scenario
        self.objective = objective
        self.search_budget = search_budget
        self._cost = cost
        self._on_run = on_run or (lambda text: None)

    def config(self, num_replicas: int = 1, seed: int = 0) -> SimulationConfig:
        """Return what serves."""
        setup = replace(self.scenario.setup, num_replicas=num_replicas)
        config = replace(self.scenario, setup=setup, seed=self.scenario.seed + seed).make_config()
        return config if self._cost is None else replace(config, cost=self._cost, speed=None)

    def workload(self, rate: float, num_replicas: int = 1, seed: int = 0) -> Workload:
        """Make the workload at a rate, long enough for a load test."""
        num = max(
            self.search_budget.num_requests * num_replicas,
            math.ceil(self.search_budget.spans * self.objective.longest_s * rate),
        )
        spec = replace(at_rate(self.scenario.workload, rate), num_requests=num, duration_s=None)
        return make_workload(spec, self.scenario.seed + seed)

    def at(self, rate: float, num_replicas: int = 1) -> LoadTest:
        """Try a rate.

        Args:
            rate: Requests per second, all replicas together.
            num_replicas: Replicas that share them.
        """
        workloads = [self.workload(rate, num_replicas, seed) for seed in range(self.search_budget.seeds)]
        watch = _Watch(self.objective, [len(one.requests) for one in workloads], self.search_budget.warm_up)
        runs = []
        for seed, workload in enumerate(workloads):
            self._on_run(f"{rate:.3g} req/s, {_replicas(num_replicas)}, seed {self.scenario.seed + seed}")
            config = self.config(num_replicas, seed)
            meter = Meter(config.cost)
            config = replace(config, cost=meter)
            try:
                run = simulate(workload, config, sinks=(watch,))
            except _GivenUp:
                measured = {name: math.inf for name, _ in self.objective.limits()}
                return LoadTest(rate=rate, num_replicas=num_replicas, is_kept=False, measured=measured)
            counted = [one for one in run.records if int(one.request_id) >= watch.first_counted]
            runs.append(LoadTestRun(run=run, counted=counted, meter=meter, config=config))
            watch.next_run()
        measured = self.objective.measure([record for one in runs for record in one.counted])
        return LoadTest(
            rate=rate,
            num_replicas=num_replicas,
            is_kept=self.objective.is_kept(measured),
            measured=measured,
            runs=tuple(runs),
        )


class _Watch:
    """An event sink that gives a load test up once its objective is broken for sure."""

    def __init__(self, objective: Objective, sizes: list[int], warm_up: float) -> None:
        self._slo = objective.slo
        self._firsts = [int(size * warm_up) for size in sizes]
        num_counted = sum(sizes) - sum(self._firsts)
        self._may_be_late = num_counted * (1 - objective.percentile / 100)
        self._num_late = 0
        self._run = 0

    @property
    def first_counted(self) -> int:
        """Number of the first request of this run that counts."""
        return self._firsts[self._run]

    def next_run(self) -> None:
        """Go on to the next run of the load test."""
        self._run += 1

    def __call__(self, event: Event) -> None:
        """Count a request that is late."""
        if not isinstance(event, RequestFinished) or int(event.request_id) < self.first_counted:
            return
        slo = self._slo
        first_at = event.first_token_at if event.first_token_at is not None else math.inf
        late = (slo.ttft_s is not None and first_at - event.arrived_at > slo.ttft_s) or (
            slo.e2e_s is not None and event.at - event.arrived_at > slo.e2e_s
        )
        self._num_late += late
        # One more than may be late: percentiles are values that occur, and rounding must not end a load test wrongly.
        if self._num_late > self._may_be_late + 1:
            raise _GivenUp


def _replicas(num: int) -> str:
    return "1 replica" if num == 1 else f"{num} replicas"
