"""A plan: the capacity of a replica within the SLO, the replicas that the traffic needs, and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.planning.load_test import LoadTest, LoadTests, Objective, SearchBudget
from manylora.lab.planning.search import Capacity, find_capacity, first_guess, most_requests_per_s
from manylora.lab.planning.usage import LoadTestUsage, bottleneck_of, usage_of
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.sim.scenario import Scenario
from manylora.lab.workloads import Workload

__all__ = ["MOST_SIMULATED", "Cost", "Plan", "TrafficDemand", "make_plan"]

MOST_SIMULATED = 8
"""Most replicas that are simulated together; larger numbers are computed by division."""

LEAST_TOLERANCE = 1e-4
"""Load tests cannot tell closer rates apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDemand:
    """The traffic and price to plan for.

    Args:
        rate: Traffic in requests per second, all replicas together; ``None`` plans for one full replica.
        price_per_hour: Price of a device, in any currency; ``None`` for no cost.
        tolerance: Largest error of the capacity, as a share of the true one.
    """

    rate: float | None = None
    price_per_hour: float | None = None
    tolerance: float = 0.02
    search_budget: SearchBudget = field(default_factory=SearchBudget)

    def __post_init__(self) -> None:
        for name in ("rate", "price_per_hour"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "above 0")
        is_share = LEAST_TOLERANCE <= self.tolerance < 1
        require(is_share, "tolerance", self.tolerance, f"a share in [{LEAST_TOLERANCE}, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of all devices of all replicas at the planned traffic, in the currency of the price."""

    per_hour: float
    per_million_output_tokens: float
    per_million_tokens: float
    per_million_requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of planning.

    Args:
        most_per_s: Requests per second of a replica that is never idle, in closed form.
        capacity: Capacity of one replica.
        binds: The bottleneck; ``None`` if no rate meets the SLO.
        usage: Usage of the planned service, or of one replica at capacity; ``None`` if no rate meets the SLO.
        num_replicas: Replicas for the traffic: 1 without a rate, ``None`` if ``MOST_SIMULATED`` are too few.
        is_simulated: Whether the replicas were simulated together, not computed by division.
        served: The load test of the service as planned.
        cost: Cost of the replicas; ``None`` without a price, or if no rate meets the SLO.
    """

    objective: Objective
    demand: TrafficDemand
    most_per_s: float
    capacity: Capacity
    binds: str | None = None
    usage: LoadTestUsage | None = None
    num_replicas: int | None = None
    is_simulated: bool = True
    served: LoadTest | None = None
    cost: Cost | None = None


def make_plan(
    scenario: Scenario,
    objective: Objective,
    demand: TrafficDemand,
    *,
    on_run: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a service.

    Args:
        scenario: Workload and setup; rate, length and replicas are replaced.
        objective: The SLO.
        demand: Traffic and price.
        on_run: Called with a description of each simulated run before it begins.

    Raises:
        ConfigError: The scenario does not fit together, or no rate can keep its objective.
    """
    load_tests = LoadTests(scenario, objective, demand.search_budget, on_run=on_run)
    workload, config = load_tests.workload(1.0), load_tests.config()
    _check_prompts_fit(workload, config, objective)
    most_per_s = most_requests_per_s(workload.requests, config)
    capacity = find_capacity(load_tests.at, start=first_guess(workload, config), tolerance=demand.tolerance)
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
    per_hour = demand.price_per_hour * scenario.setup.tensor_parallel * num_replicas
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
