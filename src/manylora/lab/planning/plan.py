"""A plan: the capacity of a replica within the SLO, the replicas that the traffic needs, and their cost.

Capacity is the highest rate that meets the SLO, found by bracketing and bisection. Rates are compared by their ratio:
the search ends when the lowest rate that missed the SLO is within the tolerance of the highest that met it, which is
the result.

The first guess takes a saturated device, which reads a prompt in one step and decodes with as many sequences as fit.
There is no queue, burst or cold adapter in this model, so a service with an SLO reaches less. Where adapters do not all
fit, every request is assumed to copy its adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.core.plan import AdapterLoad
from manylora.core.types import Tier
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.planning.load_test import LoadTest, LoadTests, Objective, SearchBudget
from manylora.lab.planning.usage import LoadTestUsage, bottleneck_of, usage_of
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.sim.scenario import Scenario
from manylora.lab.workloads import RequestSpec, Workload

__all__ = ["MOST_SIMULATED", "Capacity", "Plan", "TrafficDemand", "expected_load_tests", "find_capacity", "make_plan"]

MOST_SIMULATED = 8  # most replicas that are simulated together; larger numbers are computed by division
LEAST_TOLERANCE = 1e-4  # load tests cannot tell closer rates apart
WIDEN = 2.0  # factor between rates while there is no bracket

MOST_WIDENINGS = 8
"""Most times the first guess is halved (then no rate meets the SLO) or doubled (then there is no limit)."""

START = 0.6  # the first guess, as a share of the rate of a device that is never idle


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDemand:
    """The traffic and price to plan for."""

    # Traffic in requests per second, all replicas together; ``None`` plans for one full replica.
    rate: float | None = None
    price_per_hour: float | None = None  # price of a device, in any currency; ``None`` for no cost
    tolerance: float = 0.02  # largest error of the capacity, as a share of the true one
    search_budget: SearchBudget = field(default_factory=SearchBudget)

    def __post_init__(self) -> None:
        for name in ("rate", "price_per_hour"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, name, value, "above 0, and finite")
        is_share = LEAST_TOLERANCE <= self.tolerance < 1
        require(is_share, "tolerance", self.tolerance, f"a share in [{LEAST_TOLERANCE}, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a search."""

    rate: float  # requests per second; 0 if every rate missed the SLO
    met: LoadTest | None  # the load test at that rate; ``None`` if there is none
    missed: LoadTest | None  # the load test at the lowest rate that missed the SLO; ``None`` if none did
    load_tests: tuple[LoadTest, ...]  # all load tests, in the order of the search


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of all devices of all replicas at the planned traffic, in the currency of the price."""

    per_hour: float
    per_million_output_tokens: float
    per_million_tokens: float
    per_million_requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of planning."""

    objective: Objective
    demand: TrafficDemand
    most_per_s: float  # requests per second of a replica that is never idle, in closed form
    capacity: Capacity  # capacity of one replica
    binds: str | None = None  # the bottleneck; ``None`` if no rate meets the SLO
    # Usage of the planned service, or of one replica at capacity; ``None`` if no rate meets the SLO.
    usage: LoadTestUsage | None = None
    # Replicas for the traffic: 1 without a rate, ``None`` if ``MOST_SIMULATED`` are too few.
    num_replicas: int | None = None
    tensor_parallel_size: int = 1  # devices of each
    is_simulated: bool = True  # whether the replicas were simulated together, not computed by division
    served: LoadTest | None = None  # the load test of the service as planned
    cost: Cost | None = None  # cost of the replicas; ``None`` without a price, or if no rate meets the SLO

    @property
    def num_devices(self) -> int | None:
        """Devices of all replicas."""
        return None if self.num_replicas is None else self.num_replicas * self.tensor_parallel_size


def make_plan(
    scenario: Scenario,
    objective: Objective,
    demand: TrafficDemand,
    *,
    on_run: Callable[[str], None] | None = None,
    pool: Executor | None = None,
) -> Plan:
    """Plan a service: of the scenario, the rate, the length and the replicas are replaced.

    ``on_run`` and ``pool`` are those of ``LoadTests``. ``ConfigError`` if the scenario does not fit together, or no
    rate can keep its objective.
    """
    load_tests = LoadTests(scenario, objective, demand.search_budget, on_run=on_run, pool=pool)
    workload, config = load_tests.workload(1.0), load_tests.config()
    _check_prompts_fit(workload, config, objective)
    most_per_s = _most_requests_per_s(workload.requests, config)
    capacity = find_capacity(load_tests.at, start=_first_guess(workload, config), tolerance=demand.tolerance)
    if capacity.met is None:
        return Plan(objective=objective, demand=demand, most_per_s=most_per_s, capacity=capacity)
    full = usage_of(capacity.met)
    served, num_replicas, is_simulated = _fit(load_tests, capacity, demand)
    usage = full if served is capacity.met else usage_of(served)
    return Plan(
        objective=objective,
        demand=demand,
        most_per_s=most_per_s,
        capacity=capacity,
        binds=bottleneck_of(capacity.met, full, objective),
        usage=usage,
        num_replicas=num_replicas,
        tensor_parallel_size=scenario.setup.tensor_parallel_size,
        is_simulated=is_simulated,
        served=served,
        cost=_price(scenario, demand, usage, served, num_replicas),
    )


def _check_prompts_fit(workload: Workload, config: SimulationConfig, objective: Objective) -> None:
    """Raise if refused prompts, which count as infinite latency at every rate, already break the SLO."""
    longest = min(config.base.max_model_len, config.num_pages * config.memory.block_size) - 1
    num_refused = sum(one.num_prompt_tokens > longest for one in workload.requests)
    if num_refused > len(workload.requests) * (1 - objective.percentile / 100):
        raise ConfigError(
            f"{num_refused} of {len(workload.requests)} prompts have more than the {longest} tokens that "
            f"{config.base.name} can take here, and are refused at every rate: cut them "
            f"(--set workload.lengths.bounds.max_prompt={longest}), or take a model of a longer context"
        )


def _fit(load_tests: LoadTests, capacity: Capacity, demand: TrafficDemand) -> tuple[LoadTest, int | None, bool]:
    """Return the load test of enough replicas, their number, and whether they were simulated together.

    The number is ``None`` if ``MOST_SIMULATED`` replicas miss the SLO although division says that they are enough.
    """
    assert capacity.met is not None
    if demand.rate is None:
        return capacity.met, 1, True
    num = max(1, math.ceil(demand.rate / capacity.rate))
    if num > MOST_SIMULATED:
        return capacity.met, num, False
    for more in range(num, MOST_SIMULATED + 1):
        # Replicas share bursts, but each sees an adapter less often; the net effect must be simulated.
        load_test = load_tests.at(demand.rate, more)
        if load_test.is_met:
            return load_test, more, True
    return capacity.met, None, True


def _price(
    scenario: Scenario, demand: TrafficDemand, usage: LoadTestUsage, served: LoadTest, num_replicas: int | None
) -> Cost | None:
    if demand.price_per_hour is None or num_replicas is None:
        return None
    per_hour = demand.price_per_hour * scenario.setup.tensor_parallel_size * num_replicas
    # Replicas computed by division are each counted as one at capacity.
    rate = served.rate if demand.rate is None else demand.rate
    more = rate / served.rate

    def per_million(rate_per_s: float) -> float:
        return per_hour * 1e6 / (3600 * rate_per_s) if rate_per_s > 0 else math.inf

    return Cost(
        per_hour=per_hour,
        per_million_output_tokens=per_million(more * usage.output_tokens_per_s),
        per_million_tokens=per_million(more * (usage.output_tokens_per_s + usage.prompt_tokens_per_s)),
        per_million_requests=per_million(rate),
    )


def expected_load_tests(tolerance: float) -> int:
    """Return about how many load tests a search takes: two that bracket the capacity, then halvings of the bracket."""
    return 2 + math.ceil(math.log2(math.log(WIDEN) / math.log1p(tolerance)))


def find_capacity(try_rate: Callable[[float], LoadTest], *, start: float, tolerance: float = 0.02) -> Capacity:
    """Search for the highest rate that meets the SLO, from a first guess on, within a share of the true capacity.

    ``try_rate`` runs a load test at a rate in requests per second; the SLO must be met at every lower rate as well.
    ``ConfigError`` if the guess or the tolerance is out of range.
    """
    if not start > 0 or not 0 < tolerance < 1:
        raise ConfigError(f"Got {start = }, {tolerance = }, expected a rate above 0 and a share in (0, 1)")
    load_tests: list[LoadTest] = []

    def attempt(rate: float) -> LoadTest:
        load_tests.append(try_rate(rate))
        return load_tests[-1]

    met: LoadTest | None = None
    missed: LoadTest | None = None
    rate = start
    for _ in range(1 + MOST_WIDENINGS):
        load_test = attempt(rate)
        if load_test.is_met:
            met, rate = load_test, rate * WIDEN
        else:
            missed, rate = load_test, rate / WIDEN
        if met is not None and missed is not None:
            break
    if met is None or missed is None:
        return Capacity(rate=met.rate if met is not None else 0.0, met=met, missed=missed, load_tests=tuple(load_tests))
    while missed.rate > met.rate * (1 + tolerance):
        middle = attempt((met.rate * missed.rate) ** 0.5)
        if middle.is_met:
            met = middle
        else:
            missed = middle
    return Capacity(rate=met.rate, met=met, missed=missed, load_tests=tuple(load_tests))


def _first_guess(workload: Workload, config: SimulationConfig) -> float:
    """Return the rate at which a search begins, in requests per second; the workload's times are ignored.

    ``AdapterError`` if an adapter applies to no module of the base.
    """
    most = _most_requests_per_s(workload.requests, config)
    versions = adapter_versions(workload.adapters, config.base)
    if sum(one.num_pages for one in versions.values()) <= config.num_pages // 2:
        return START * most
    asked = [versions[one.adapter] for one in workload.requests[:500] if one.adapter is not None]
    copies_s = sum(config.cost.load_time_s(AdapterLoad(version=one, tier=Tier.DEVICE)) for one in asked)
    return START * min(most, len(asked) / copies_s if copies_s else most)


def _most_requests_per_s(requests: Sequence[RequestSpec], config: SimulationConfig) -> float:
    """Return the approximate requests per second of a replica that is never idle; the requests' times are ignored."""
    prompt = max(1, round(sum(one.num_prompt_tokens for one in requests) / len(requests)))
    output = max(1, round(sum(one.num_output_tokens for one in requests) / len(requests)))
    context = prompt + output // 2
    fits = config.num_pages * config.base.page.block_size // (prompt + output)
    num_seqs = max(1, min(config.scheduler.max_num_seqs, fits))
    budget = config.scheduler.max_num_batched_tokens
    num_chunks = -(-prompt // budget)
    chunk = -(-prompt // num_chunks)
    prompt_s = num_chunks * config.cost.step_time_s(synthetic_plan([SyntheticSequence(0, chunk)]))
    decode_s = config.cost.step_time_s(synthetic_plan([SyntheticSequence(context, 1)] * num_seqs)) / num_seqs
    return 1 / (prompt_s + (output - 1) * decode_s)
