"""The planner: its search against queueing theory, and what it says of services whose limits are known."""

from __future__ import annotations

import math
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from manylora.cli.commands.plan import PlanProgress
from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.errors import AdapterNotFound, CapacityError, ConfigError, ContextExceeded
from manylora.lab.catalog.models import find_dims
from manylora.lab.costs.model import CostModel, FixedCost
from manylora.lab.measure import Slo
from manylora.lab.planning.load_test import LoadTest, LoadTests, Objective, SearchBudget, at_rate
from manylora.lab.planning.plan import Capacity, Plan, TrafficDemand, expected_load_tests, find_capacity, make_plan
from manylora.lab.planning.report import choose_plan, comparison_table, plan_tables, shortage
from manylora.lab.planning.usage import usage_of
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.sim.scenario import Scenario
from manylora.lab.sim.setup import Setup
from manylora.lab.workloads import AdapterSet, WorkloadSpec
from manylora.lab.workloads.arrivals import ArrivalProcess, PoissonArrivals, ReplayArrivals, StepArrivals
from manylora.lab.workloads.callers import AzureFunctions2019, GammaCallers
from manylora.lab.workloads.lengths import ExponentialTokens, FixedTokens, ParametricLengths
from manylora.lab.workloads.popularity import TurnTaking
from manylora.lab.workloads.spec import Conversations

STEP_S = 0.1


def scenario(
    *,
    prompt: int = 8,
    output: int = 1,
    num_adapters: int = 0,
    setup: Setup | None = None,
    scheduler: SchedulerConfig | None = None,
) -> Scenario:
    workload = WorkloadSpec(
        arrivals=PoissonArrivals(rate=1.0),
        lengths=ParametricLengths(prompt=FixedTokens(tokens=prompt), output=FixedTokens(tokens=output)),
        adapters=AdapterSet(count=num_adapters, ranks=(64,)),
        popularity=TurnTaking() if num_adapters else None,
    )
    return Scenario(
        workload=workload,
        setup=replace(setup or Setup(num_pages=500), scheduler=scheduler or SchedulerConfig(max_num_seqs=1)),
    )


def served_within(sojourn_s: float, rate: float) -> float:
    """Return the share of an M/D/1 queue's customers that leave within a time (Crommelin's formula)."""
    wait = sojourn_s / STEP_S - 1  # in units of the service time
    load = rate * STEP_S
    if wait < 0:
        return 0.0
    terms = ((load * (k - wait)) ** k / math.factorial(k) * math.exp(-load * (k - wait)) for k in range(int(wait) + 1))
    return (1 - load) * sum(terms)


@dataclass(frozen=True, kw_only=True)
class PricedScenario(Scenario):
    """A scenario with prices of its own."""

    cost: CostModel

    def make_config(self) -> SimulationConfig:
        return replace(Scenario.make_config(self), cost=self.cost)


def priced(scenario: Scenario, cost: CostModel) -> Scenario:
    return PricedScenario(**{one.name: getattr(scenario, one.name) for one in fields(scenario)}, cost=cost)


@pytest.mark.slow
@pytest.mark.parametrize(("limit_s", "percentile"), [(0.25, 90.0), (0.35, 80.0)])
def test_capacity_of_one_server_is_that_of_queueing_theory(limit_s: float, percentile: float) -> None:
    """One sequence at a time, one step each, no adapter: Poisson arrivals, deterministic service, one server."""
    load_tests = LoadTests(
        priced(scenario(), FixedCost(step_s=STEP_S, token_s=0.0)),
        Objective(slo=Slo(ttft_s=limit_s), percentile=percentile),
        SearchBudget(num_requests=1500, seeds=1),
    )
    found = find_capacity(load_tests.at, start=5.0, tolerance=0.02)
    low, high = 0.1, 1 / STEP_S
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if served_within(limit_s, middle) >= percentile / 100 else (low, middle)
    assert found.rate == pytest.approx(low, rel=0.05)
    assert found.missed is not None and found.rate < found.missed.rate <= found.rate * 1.02


def test_runs_in_other_processes_find_the_same() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        alone, together = (
            LoadTests(scenario(), Objective(slo=Slo(ttft_s=0.2)), SearchBudget(num_requests=100), pool=one)
            for one in (None, pool)
        )
        for rate in (1.0, 200.0):
            expected, found = alone.at(rate), together.at(rate)
            assert found.measured == expected.measured and found.is_met == expected.is_met == (rate == 1.0)
            assert [one.run.records for one in found.runs] == [one.run.records for one in expected.runs]
            assert usage_of(found) == usage_of(expected) if found.is_met else not found.runs


@pytest.mark.parametrize(
    "error",
    [
        AdapterNotFound("math", "there is none"),
        ContextExceeded.of_answer(5, 9, 10),
        CapacityError("full", retry_after_s=2.0, status=503),
    ],
)
def test_an_error_of_a_run_in_another_process_keeps_its_words(error: Exception) -> None:
    made = pickle.loads(pickle.dumps(error))
    assert type(made) is type(error) and str(made) == str(error) and vars(made) == vars(error)


# -- the search --------------------------------------------------------------------------------------------------------


def search(limit: float, start: float, tolerance: float = 0.02) -> Capacity:
    return find_capacity(
        lambda rate: LoadTest(rate=rate, num_replicas=1, is_met=rate <= limit, measured={}),
        start=start,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("start", [0.1, 1.0, 3.0, 3.1, 50.0])
def test_the_search_ends_below_the_limit_and_near_it(start: float) -> None:
    found = search(3.05, start)
    assert 3.05 / 1.02 <= found.rate <= 3.05
    assert found.met is not None and found.met.rate == found.rate


def test_a_promise_that_no_rate_keeps_is_no_capacity() -> None:
    found = search(0.0, 1.0)
    assert found.rate == 0.0 and found.met is None and found.missed is not None and len(found.load_tests) == 9


def test_a_limit_that_is_never_met_is_said_so() -> None:
    found = search(math.inf, 1.0)
    assert found.rate == 256.0 and found.missed is None


def test_hopeless_rates_are_given_up_early() -> None:
    load_tests = LoadTests(
        priced(scenario(), FixedCost(step_s=STEP_S, token_s=0.0)),
        Objective(slo=Slo(ttft_s=0.2)),
        SearchBudget(num_requests=2000, seeds=2),
    )
    hopeless = load_tests.at(100.0)
    assert not hopeless.is_met and hopeless.runs == () and hopeless.measured == {"ttft": math.inf}


def test_weights_are_those_of_all_devices_of_a_replica() -> None:
    """Keys of a head that several devices have are on each of them, and so are norms and routers."""
    shared = Setup(model="llama-3-8b", hardware="a40", tensor_parallel_size=16, num_pages=500)
    budget = SearchBudget(num_requests=10, seeds=1, spans=0)
    found = LoadTests(scenario(setup=shared), Objective(slo=Slo(ttft_s=9.0)), budget).at(1.0)
    dims = find_dims("llama-3-8b")
    weights = usage_of(found).memory.weights
    assert weights == dims.weight_bytes_on(16) > 1.02 * dims.weight_bytes


def test_each_limit_may_be_missed_by_its_own_share_of_requests() -> None:
    """Long answers are late at their end and not at their start: what is measured is a limit that is kept."""
    lengths = ParametricLengths(prompt=FixedTokens(tokens=64), output=ExponentialTokens(mean=40.0))
    longer = scenario(setup=Setup(num_pages=5000), scheduler=SchedulerConfig(max_num_seqs=16))
    longer = replace(longer, workload=replace(longer.workload, lengths=lengths))
    budget = SearchBudget(num_requests=400, seeds=2, spans=0)

    def load_test(ttft_s: float, e2e_s: float) -> LoadTest:
        objective = Objective(slo=Slo(ttft_s=ttft_s, e2e_s=e2e_s), percentile=90)
        return LoadTests(longer, objective, budget).at(9.0)

    found = load_test(1e3, 1e3).measured
    assert load_test(found["ttft"], found["e2e"]).is_met
    for limits in ((0.99 * found["ttft"], 1e3), (1e3, 0.99 * found["e2e"])):
        assert not load_test(*limits).is_met


def test_the_same_requests_come_at_every_rate() -> None:
    load_tests = LoadTests(scenario(), Objective(slo=Slo(ttft_s=0.2)), SearchBudget(num_requests=50))
    slow, fast = load_tests.workload(1.0).requests, load_tests.workload(4.0).requests
    assert [one.arrival_s for one in slow] == pytest.approx([4 * one.arrival_s for one in fast[: len(slow)]])
    steps = at_rate(replace(scenario().workload, arrivals=StepArrivals(rates=(1.0, 3.0), step_s=5.0)), 6.0)
    assert isinstance(steps.arrivals, StepArrivals) and steps.arrivals.rates == (3.0, 9.0)


@pytest.mark.parametrize("rate", [2.0, 40.0])
@pytest.mark.parametrize("kind", ["callers", "day", "counts", "replay"])
def test_a_run_has_the_rate_that_it_is_named_by(kind: str, rate: float, tmp_path: Path) -> None:
    """Also if the mean over all callers, a whole cycle or a whole recording is another than that at its beginning."""
    trace = tmp_path / "trace.jsonl"
    times = [1000 * second for second in [*range(0, 6000, 10), *range(6000, 6600)]]  # 0.1, then 1 a second
    trace.write_text(
        "".join(f'{{"timestamp": {ms}, "input_length": 1, "output_length": 1, "hash_ids": []}}\n' for ms in times)
    )
    counts = tmp_path / "counts.csv"
    counts.write_text("HashFunction," + ",".join(map(str, range(120))) + "\nf" + 60 * ",6" + 60 * ",60" + "\n")
    arrivals: dict[str, ArrivalProcess] = {
        "callers": GammaCallers(rate=1.0, cov=1.0, num_callers=10),
        "day": StepArrivals(rates=(1.0, 9.0), step_s=50.0),
        "counts": AzureFunctions2019(file=counts),
        "replay": ReplayArrivals(file=trace),
    }
    one = scenario()
    one = replace(one, workload=replace(one.workload, arrivals=arrivals[kind]))
    load_tests = LoadTests(one, Objective(slo=Slo(ttft_s=0.2)), SearchBudget(num_requests=500))
    num = [len(load_tests.workload(rate, seed=seed).requests) for seed in range(8)]
    lasted_s = [load_tests.workload(rate, seed=seed).requests[-1].arrival_s for seed in range(8)]
    assert min(num) >= 400 and sum(num) / sum(lasted_s) == pytest.approx(rate, rel=0.06)


def test_conversations_have_no_rate_of_requests() -> None:
    turns = Conversations(turns=FixedTokens(tokens=4), pause_s=FixedTokens(tokens=5))
    with pytest.raises(ConfigError, match=r"workload\.conversations, whose arrivals have no rate of requests"):
        at_rate(replace(scenario().workload, conversations=turns), 2.0)


def test_refused_requests_break_a_promise() -> None:
    crowded = scenario(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting=1))
    objective = Objective(slo=Slo(ttft_s=10.0))
    load_test = LoadTests(
        priced(crowded, FixedCost(step_s=STEP_S)), objective, SearchBudget(num_requests=500, seeds=1, spans=0)
    ).at(9.0)
    assert not load_test.is_met and load_test.measured["ttft"] == math.inf


# -- plans -------------------------------------------------------------------------------------------------------------


def plan(one: Scenario, slo: Slo, cost: FixedCost | None, **demand: float) -> Plan:
    search_budget = SearchBudget(num_requests=200, seeds=1, spans=10.0)
    demanded = TrafficDemand(search_budget=search_budget, tolerance=0.1, **demand)  # type: ignore[arg-type]
    return make_plan(one if cost is None else priced(one, cost), Objective(slo=slo), demanded)


def test_prompts_that_never_fit_are_said_before_any_search() -> None:
    objective = Objective(slo=Slo(ttft_s=1.0))
    with pytest.raises(ConfigError, match=r"200 of 200 prompts have more than the 7999 tokens .*max_prompt=7999\)"):
        make_plan(scenario(prompt=8000), objective, TrafficDemand(search_budget=SearchBudget(num_requests=200)))


def test_too_few_seats_bind() -> None:
    one = scenario(output=20, scheduler=SchedulerConfig(max_num_seqs=2))
    made = plan(one, Slo(ttft_s=0.5), FixedCost(step_s=0.01, token_s=0.0))
    assert made.binds == "seats" and made.usage is not None
    # Two at a time for 20 steps of 10 ms is ten per second, if nobody ever waited.
    assert 5.0 < made.capacity.rate < 10.0


def test_too_little_memory_binds() -> None:
    small = Setup(num_pages=22)
    one = scenario(prompt=80, output=40, setup=small, scheduler=SchedulerConfig(max_num_seqs=64))
    made = plan(one, Slo(ttft_s=1.0), FixedCost(step_s=0.01, token_s=0.0))
    assert made.binds == "memory"


def test_a_slow_link_binds() -> None:
    """Each request brings another adapter of 8 MB, and the pool has room for few."""
    one = scenario(
        num_adapters=60,
        setup=Setup(num_pages=300, adapters=AdapterConfig(look_ahead=0)),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    made = plan(one, Slo(ttft_s=4.0), FixedCost(step_s=0.001, token_s=0.0, copy_bytes_per_s=2e8))
    assert made.binds == "link" and made.usage is not None
    assert made.usage.link_busy > 0.5 > made.usage.device_busy


@pytest.mark.slow
def test_from_data_sheets_a_promise_on_gaps_is_bound_by_steps() -> None:
    one = scenario(prompt=500, output=30, setup=Setup(model="llama-3-8b", hardware="a40"), scheduler=SchedulerConfig())
    made = plan(one, Slo(tbt_s=0.06), None, price_per_hour=2.0)
    assert made.binds in ("compute", "bandwidth") and made.usage is not None and made.cost is not None
    assert sum(made.usage.step_parts.values()) == pytest.approx(1.0)
    assert made.usage.memory.weights == pytest.approx(16.06e9, rel=0.01)
    shares = made.usage.memory.mean
    assert sum(shares.values()) == pytest.approx(made.usage.memory.pool, rel=1e-6)
    # 30 tokens per request at so many requests per second, for 2.0 an hour.
    assert made.cost.per_million_output_tokens == pytest.approx(2e6 / (3600 * 30 * made.capacity.rate), rel=0.05)
    assert made.cost.per_million_requests == pytest.approx(2e6 / (3600 * made.capacity.rate))


def test_traffic_gets_as_many_replicas_as_keep_the_promise() -> None:
    cost = FixedCost(step_s=STEP_S, token_s=0.0)
    made = plan(scenario(), Slo(ttft_s=0.5), cost, rate=15.0, price_per_hour=1.0)
    assert made.num_replicas is not None and made.served is not None and made.is_simulated
    assert made.num_replicas >= 15.0 / 10 and made.served.is_met and made.served.num_replicas == made.num_replicas
    assert made.cost is not None and made.cost.per_hour == made.num_replicas
    many = plan(scenario(), Slo(ttft_s=0.5), cost, rate=500.0, price_per_hour=1.0)
    assert many.num_replicas == math.ceil(500.0 / many.capacity.rate) and not many.is_simulated
    assert many.cost is not None
    assert many.cost.per_million_requests == pytest.approx(many.num_replicas * 1e6 / (3600 * 500.0))


@pytest.mark.slow
def test_a_plan_chooses_how_many_devices_share_a_model() -> None:
    """A tight limit on gaps: one device misses it, two meet it, and four do at a higher cost."""
    sizes, slo = (1, 2, 4), Slo(tbt_s=0.008)
    plans = []
    for size in sizes:
        setup = Setup(model="llama-3-8b", hardware="a100-80", tensor_parallel_size=size)
        one = scenario(prompt=64, output=20, setup=setup, scheduler=SchedulerConfig(max_num_seqs=4))
        plans.append(plan(one, slo, None, price_per_hour=2.0, rate=4.0))
    assert [one.capacity.met is not None for one in plans] == [False, True, True]
    assert [one.num_devices for one in plans[1:]] == [2, 4]
    assert [one.cost.per_hour for one in plans[1:] if one.cost is not None] == [4.0, 8.0]
    assert choose_plan(plans) == 1
    assert choose_plan(plans[:1]) is None
    table = comparison_table([({"tp": str(size)}, one) for size, one in zip(sizes, plans, strict=True)])
    column = table.columns.index("devices")
    assert [row[column] for row in table.rows] == ["-", "2", "4"]


def test_no_number_is_named_that_was_not_seen_to_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a router that sends everything to one replica: division says four, and eight do not keep the promise."""
    alone = LoadTests.at

    def at(load_tests: LoadTests, rate: float, num_replicas: int = 1) -> LoadTest:
        if num_replicas == 1:
            return alone(load_tests, rate)
        return LoadTest(rate=rate, num_replicas=num_replicas, is_met=False, measured={"ttft": math.inf})

    monkeypatch.setattr(LoadTests, "at", at)
    made = plan(scenario(), Slo(ttft_s=0.5), FixedCost(step_s=STEP_S, token_s=0.0), rate=30.0, price_per_hour=1.0)
    assert made.capacity.rate > 0 and made.num_replicas is None and made.cost is None
    shown = dict(row for table in plan_tables(made)[:1] for row in table.rows)
    assert shown["replicas for 30 req/s"].startswith("more than 8")


def test_a_recording_that_is_shorter_than_a_load_test_is_said(tmp_path: Path) -> None:
    trace, said = tmp_path / "counts.csv", []
    trace.write_text("HashFunction,0,1\nf,30,30\n")
    for minute_s in (3.0, 300.0):
        one, arrivals = scenario(), AzureFunctions2019(file=trace, minute_s=minute_s)
        one = replace(one, workload=replace(one.workload, arrivals=arrivals))
        said.append(shortage(plan(one, Slo(ttft_s=0.5), FixedCost(step_s=STEP_S, token_s=0.0))))
    assert re.search(r"had \d\d requests, all of the recording, not 200:", said[0] or "")
    assert said[1] is None


def test_a_promise_that_cannot_be_kept_is_a_plan_for_nothing() -> None:
    made = plan(scenario(), Slo(ttft_s=0.05), FixedCost(step_s=STEP_S), rate=1.0, price_per_hour=1.0)
    assert made.capacity.rate == 0.0 and made.num_replicas is None and made.binds is None and made.cost is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(), "No objective to plan for"),
        (lambda: Objective(slo=Slo(ttft_s=-1.0)), r"ttft_s = -1\.0"),
        (lambda: Objective(slo=Slo(ttft_s=1.0), percentile=100.0), r"percentile = 100\.0"),
        (lambda: TrafficDemand(rate=0.0), r"rate = 0\.0"),
        (lambda: TrafficDemand(tolerance=1.0), r"tolerance = 1\.0"),
        (lambda: TrafficDemand(tolerance=1e-18), "tolerance = 1e-18"),
        (lambda: SearchBudget(num_requests=3), "num_requests = 3"),
        (
            lambda: LoadTests(scenario(), Objective(slo=Slo(ttft_s=1e9)), SearchBudget()).at(2.0),
            r"limit of 1e\+09 s at 2 requests/s takes 60,000,000,000 requests, more than 5,000,000",
        ),
        (lambda: find_capacity(lambda rate: None, start=0.0), "start = 0.0"),  # type: ignore[arg-type,return-value]
    ],
)
def test_wrong_values_are_named(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_progress_says_how_long_it_takes_and_is_quiet_without_a_terminal() -> None:
    times = iter((0.0, 0.0, 4.0, 12.0, 16.0, 40.0))
    lines: list[str] = []
    progress = PlanProgress(10, lines.append, is_live=False, now=lambda: next(times))
    for _ in range(5):
        progress.begin_run("1 req/s")
    assert lines == [
        "about 10 runs of the simulator; the first ones tell how long they take",
        "run 3 of about 10, about 48 s left: 1 req/s",
        "run 5 of about 10, about 60 s left: 1 req/s",
    ]
    times, pairs = iter((0.0, 0.0, 0.1, 12.0, 12.1)), list[str]()
    progress = PlanProgress(4, pairs.append, is_live=True, now=lambda: next(times), at_once=2)
    for _ in range(4):
        progress.begin_run("")
    assert [line.partition(":")[0] for line in pairs[2:]] == [
        "run 2 of about 4",
        "run 3 of about 4, about 12 s left",
        "run 4 of about 4, about 12 s left",
    ]
    live: list[str] = []
    progress = PlanProgress(1, live.append, is_live=True, now=lambda: 0.0)
    for _ in range(2):
        progress.begin_run("")
    assert len(live) == 3
    assert live[-1].startswith("run 2 of about 2")


@pytest.mark.parametrize(("tolerance", "most"), [(0.5, 1), (0.1, 1), (0.02, 1)])
def test_the_number_of_load_tests_is_about_as_expected(tolerance: float, most: int) -> None:
    def load_test(rate: float) -> LoadTest:
        return LoadTest(rate=rate, num_replicas=1, is_met=rate <= 7.3, measured={})

    found = find_capacity(load_test, start=6.0, tolerance=tolerance)
    assert abs(len(found.load_tests) - expected_load_tests(tolerance)) <= most
