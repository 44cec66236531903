"""A load test: the workload at one rate, simulated by the engine's own code, and checked against the objective.

With the same seeds and number of requests, two rates see the same requests with all gaps scaled by one factor. A load
test stops early once it can no longer meet the SLO, so rates that are far too high cost little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from manylora.core.errors import ConfigError
from manylora.core.events import Event, RequestFinished
from manylora.core.options import CheckedOptions, option, require
from manylora.lab.costs.roofline import PriceMeter
from manylora.lab.measure import RequestRecord, Slo, gaps_of
from manylora.lab.sim.run.simulation import Run, SimulationConfig, simulate
from manylora.lab.sim.scenario import Scenario
from manylora.lab.workloads import Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import ArrivalProcess, ReplayArrivals, StepArrivals
from manylora.lab.workloads.callers import AzureFunctions2019, AzureFunctions2021, GammaCallers, ServeGenClients

__all__ = ["LoadTest", "LoadTestRun", "LoadTests", "Objective", "SearchBudget", "at_rate"]

MOST_REQUESTS = 5_000_000  # of a load test; they are in memory together
WARM_UP = 0.1  # share of a run's first requests that are not counted, because caches begin empty

_WATCHED = ("ttft", "e2e")  # metrics of which a run shows early that too many requests miss the limit

RECORDED = (AzureFunctions2019, AzureFunctions2021, ReplayArrivals, ServeGenClients)
"""Arrivals whose rate is the mean of the whole recording, and a run may see a busier or a quieter part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Limits that a share of all requests (of all gaps, for the time between tokens) must keep."""

    slo: Slo = field(default_factory=Slo)  # the limits; at least one is set
    percentile: float = 99.0  # percentage that must keep them

    def __post_init__(self) -> None:
        require(0 < self.percentile < 100, "percentile", self.percentile, "a number between 0 and 100")
        if not dict(self.limits()):
            raise ConfigError("No objective to plan for: give a limit on ttft_s, tbt_s, tpot_s or e2e_s")

    def limits(self) -> Iterator[tuple[str, float]]:
        """Yield each metric that has a limit (``ttft``, ``tbt``, ``tpot``, ``e2e``), and the limit in seconds."""
        for name in ("ttft", "tbt", "tpot", "e2e"):
            limit = getattr(self.slo, f"{name}_s")
            if limit is not None:
                yield name, limit

    @property
    def longest_s(self) -> float:
        """The longest of the limits, in seconds."""
        return max(limit for _, limit in self.limits())

    def measure(self, records: Sequence[RequestRecord]) -> dict[str, float]:
        """Return the percentile of every limited metric, in seconds; infinite where too many requests failed."""
        return {name: _percentile(_pooled(name, records), self.percentile) for name, _ in self.limits()}

    def is_met(self, measured: dict[str, float]) -> bool:
        """Whether measured percentiles are within their limits."""
        return all(measured[name] <= limit for name, limit in self.limits())

    def tightest(self, measured: dict[str, float]) -> str:
        """Return the name of the metric that is nearest to its limit, or furthest beyond it."""
        return max(self.limits(), key=lambda limit: measured[limit[0]] / limit[1])[0]


def _pooled(name: str, records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    """Return a metric over requests (over gaps, for ``tbt``) in seconds; a failed request counts as infinite."""
    failed = sum(record.error is not None for record in records)
    good = [record for record in records if record.error is None]
    if name == "tbt":
        values = gaps_of(good)
    else:
        times = (getattr(record, f"{name}_s") for record in good)
        values = np.fromiter((time for time in times if time is not None), dtype=np.float64)
    return np.concatenate([values, np.full(failed, math.inf)])


def _percentile(values: NDArray[np.float64], percentile: float) -> float:
    if not len(values):
        return 0.0
    # The value itself, not an interpolation: between a number and infinity there is none.
    return float(np.quantile(values, percentile / 100, method="higher"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget(CheckedOptions):
    """Size of a load test.

    A run lasts for many times the longest limit: at a rate that is slightly too high the queue needs time to grow.
    """

    num_requests: int = option(2000, at_least=10, help="Least requests per run and replica.")
    seeds: int = option(2, at_least=1, help="Runs of a load test; percentiles are over all of their requests.")
    spans: float = option(30.0, at_least=0, help="Least length of a run, in multiples of the longest limit.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestRun:
    """One run of a load test."""

    run: Run
    counted: list[RequestRecord]  # requests after the warm-up
    num_late: dict[str, int]  # of them, beyond the limit on the first token, and beyond that on the end
    meter: PriceMeter  # the device's time by part
    config: SimulationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """The result of one rate."""

    rate: float  # requests per second, all replicas together
    num_replicas: int
    is_met: bool  # whether the SLO was met
    # Each limited metric at its percentile, in seconds; infinite if the load test stopped early.
    measured: dict[str, float]
    runs: tuple[LoadTestRun, ...] = ()  # empty if the load test stopped early
    num_missing: int = 0  # requests that its shortest run should have beyond those that a recording has


def at_rate(spec: WorkloadSpec, rate: float) -> WorkloadSpec:
    """Return a workload's description with another rate, in requests per second.

    ``ConfigError`` if its arrivals have no rate, or not that of requests.
    """
    arrivals = spec.arrivals
    changed: ArrivalProcess
    if spec.conversations is not None:
        raise ConfigError("Got workload.conversations, whose arrivals have no rate of requests to search for")
    if isinstance(arrivals, GammaCallers):
        changed = replace(arrivals, rate=rate / arrivals.num_callers)
    elif isinstance(arrivals, StepArrivals):
        factor = rate * len(arrivals.rates) / sum(arrivals.rates)
        changed = replace(arrivals, rates=tuple(factor * one for one in arrivals.rates))
    elif "rate" in getattr(arrivals, "__dataclass_fields__", {}):
        changed = replace(arrivals, rate=rate)  # type: ignore[type-var]
    else:
        raise ConfigError(f"Arrivals of kind {arrivals.kind!r} have no rate to search for")
    return replace(spec, arrivals=changed)


def _at_mean(workload: Workload, rate: float) -> Workload:
    """Stretch all gaps of a workload so that its own mean rate is another, in requests per second."""
    factor = workload.rate / rate
    requests = tuple(replace(one, arrival_s=one.arrival_s * factor) for one in workload.requests)
    return replace(workload, requests=requests) if factor else workload


class _StoppedEarly(Exception):
    """Too many requests are late already to meet the SLO."""


class LoadTests:
    """Runs load tests of one scenario, whose rate and number of requests are replaced.

    ``on_run`` is called with a description of each run before it begins. The runs of a load test are made at the same
    time by the processes of ``pool``, if there is one; the results are the same.
    """

    def __init__(
        self,
        scenario: Scenario,
        objective: Objective,
        search_budget: SearchBudget,
        *,
        on_run: Callable[[str], None] | None = None,
        pool: Executor | None = None,
    ) -> None:
        self.scenario = scenario
        self.objective = objective
        self.search_budget = search_budget
        self._on_run = on_run or (lambda text: None)
        self._pool = pool

    def config(self, num_replicas: int = 1, seed: int = 0) -> SimulationConfig:
        """Return the simulated system."""
        setup = replace(self.scenario.setup, num_replicas=num_replicas)
        return replace(self.scenario, setup=setup, seed=self.scenario.seed + seed).make_config()

    def workload(self, rate: float, num_replicas: int = 1, seed: int = 0) -> Workload:
        """Make the workload at a rate, long enough for a load test; ``ConfigError`` if that takes too many requests."""
        longest_s, num = self.objective.longest_s, self._num_requests(rate, num_replicas)
        if num > MOST_REQUESTS:
            reason = f"takes {num:,} requests, more than {MOST_REQUESTS:,}"
            raise ConfigError(f"A load test for a limit of {longest_s:g} s at {rate:g} requests/s {reason}")
        spec = replace(at_rate(self.scenario.workload, rate), num_requests=num, duration_s=None)
        if isinstance(spec.arrivals, StepArrivals):  # whole cycles: the mean over a part is another rate
            cycle_s = len(spec.arrivals.rates) * spec.arrivals.step_s
            spec = replace(spec, num_requests=None, duration_s=cycle_s * math.ceil(num / rate / cycle_s))
        workload = make_workload(spec, self.scenario.seed + seed)
        return _at_mean(workload, rate) if isinstance(spec.arrivals, RECORDED) else workload

    def _num_requests(self, rate: float, num_replicas: int) -> int:
        of_spans = math.ceil(self.search_budget.spans * self.objective.longest_s * rate)
        return max(self.search_budget.num_requests * num_replicas, of_spans)

    def at(self, rate: float, num_replicas: int = 1) -> LoadTest:
        """Run a load test at a rate in requests per second, all replicas together."""
        workloads = [self.workload(rate, num_replicas, seed) for seed in range(self.search_budget.seeds)]
        num_counted = sum(len(one.requests) - _first_counted(one) for one in workloads)
        # One more than may be late: percentiles are values that occur, and rounding must not end a load test wrongly.
        most_late = dict.fromkeys(_WATCHED, num_counted * (1 - self.objective.percentile / 100) + 1)
        runs: list[LoadTestRun] = []
        for run in self._make(workloads, rate, num_replicas, most_late):
            if run is not None:
                runs.append(run)
            if run is None or any(sum(one.num_late[name] for one in runs) > most_late[name] for name in _WATCHED):
                measured = {name: math.inf for name, _ in self.objective.limits()}
                return LoadTest(rate=rate, num_replicas=num_replicas, is_met=False, measured=measured)
        measured = self.objective.measure([record for one in runs for record in one.counted])
        return LoadTest(
            rate=rate,
            num_replicas=num_replicas,
            is_met=self.objective.is_met(measured),
            measured=measured,
            runs=tuple(runs),
            num_missing=self._num_requests(rate, num_replicas) - min(len(one.requests) for one in workloads)
            if isinstance(self.scenario.workload.arrivals, RECORDED)
            else 0,
        )

    def _make(
        self, workloads: Sequence[Workload], rate: float, num_replicas: int, most_late: dict[str, float]
    ) -> Iterator[LoadTestRun | None]:
        """Yield a run of each workload: each made when the one before was taken, or all at the same time in a pool."""
        under_way = []
        for seed, workload in enumerate(workloads):
            replicas = f"{num_replicas} replica{'s' * (num_replicas != 1)}"
            self._on_run(f"{rate:.3g} req/s, {replicas}, seed {self.scenario.seed + seed}")
            wanted = (workload, self.config(num_replicas, seed), self.objective, most_late)
            if self._pool is not None:
                under_way.append(self._pool.submit(_run, *wanted))
                continue
            run = _run(*wanted)
            yield run
            if run is not None:
                most_late = {name: most - run.num_late[name] for name, most in most_late.items()}
        try:
            yield from (one.result() for one in under_way)
        finally:
            for one in under_way:  # where one has stopped early, those that have not begun
                one.cancel()


def _run(
    workload: Workload, config: SimulationConfig, objective: Objective, most_late: dict[str, float]
) -> LoadTestRun | None:
    """Simulate a workload; return ``None`` as soon as more requests are beyond a limit than ``most_late`` says."""
    meter = PriceMeter(config.cost)
    config = replace(config, cost=meter)
    late = _LateRequests(objective, _first_counted(workload), most_late)
    try:
        run = simulate(workload, config, sinks=(late,))
    except _StoppedEarly:
        return None
    counted = [one for one in run.records if int(one.request_id) >= late.first_counted]
    return LoadTestRun(run=run, counted=counted, num_late=late.num_late, meter=meter, config=config)


def _first_counted(workload: Workload) -> int:
    """Return the number of the first request that counts."""
    return int(len(workload.requests) * WARM_UP)


class _LateRequests:
    """An event sink that counts the requests beyond each limit, and stops a run with too many beyond one."""

    def __init__(self, objective: Objective, first_counted: int, most: dict[str, float]) -> None:
        self._limits = {name: limit for name, limit in objective.limits() if name in _WATCHED}
        self._most = most
        self.first_counted = first_counted
        self.num_late = dict.fromkeys(_WATCHED, 0)

    def __call__(self, event: Event) -> None:
        """Count a request that is late."""
        if not isinstance(event, RequestFinished) or int(event.request_id) < self.first_counted:
            return
        first_at = event.first_token_at if event.first_token_at is not None else math.inf
        for name, limit in self._limits.items():
            self.num_late[name] += (first_at if name == "ttft" else event.at) - event.arrived_at > limit
            if self.num_late[name] > self._most[name]:
                raise _StoppedEarly
