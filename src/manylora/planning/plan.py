"""A plan: what one replica can serve within its SLO, how many replicas traffic needs, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from manylora.costs.model import CostModel
from manylora.errors import ConfigError
from manylora.planning.capacity import Capacity, find_capacity
from manylora.planning.estimate import first_guess, most_requests_per_s
from manylora.planning.load_test import LoadTest, LoadTests, SearchBudget
from manylora.planning.slo import Objective
from manylora.planning.usage import Usage, usage_of, what_binds
from manylora.sim.run.simulation import SimulationConfig
from manylora.sim.scenario import Scenario
from manylora.workloads import Workload

__all__ = ["MOST_SIMULATED", "Cost", "Demand", "Plan", "make_plan"]

MOST_SIMULATED = 8
"""Replicas that are simulated together; more are counted by division."""


LEAST_TOLERANCE = 1e-4
"""Finer than any load test can tell two rates apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is planned for.

    Args:
        rate: Traffic in requests per second, all replicas together; ``None`` plans for one full replica.
        price_per_hour: What a device costs, in any currency; ``None`` for no cost.
        tolerance: How far the capacity that is found may lie below the true one, as a share of it.
        search budget: How much each load test takes.
    """

    rate: float | None = None
    price_per_hour: float | None = None
    tolerance: float = 0.02
    search_budget: SearchBudget = field(default_factory=SearchBudget)

    def __post_init__(self) -> None:
        for name in ("rate", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"Got {name} = {value!r}, expected above 0")
        if not LEAST_TOLERANCE <= self.tolerance < 1:
            raise ConfigError(f"Got tolerance = {self.tolerance!r}, expected a share in [{LEAST_TOLERANCE}, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What serving costs, in the currency of the price.

    Args:
        per_hour: All devices of all replicas.
        per_million_output_tokens: At the traffic planned for.
        per_million_tokens: Prompt tokens counted as well.
        per_million_requests: Requests.
    """

    per_hour: float
    per_million_output_tokens: float
    per_million_tokens: float
    per_million_requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What came out.

    Args:
        objective: What was promised.
        demand: What was planned for.
        most_per_s: Requests per second of a replica that is never idle: the floor in closed form.
        capacity: Of one replica.
        binds: What a replica would need more of to serve more; ``None`` if it serves nothing within the objective.
        usage: Of the service as planned, or of one replica at capacity; ``None`` likewise.
        num_replicas: Replicas the traffic needs; 1 without a rate, ``None`` if no number that was tried is enough.
        is_simulated: Whether so many replicas were tried together, rather than counted by division.
        served: The load test of the service as planned.
        cost: ``None`` without a price, or without a plan.
    """

    objective: Objective
    demand: Demand
    most_per_s: float
    capacity: Capacity
    binds: str | None
    usage: Usage | None
    num_replicas: int | None
    is_simulated: bool
    served: LoadTest | None
    cost: Cost | None


def make_plan(
    scenario: Scenario,
    objective: Objective,
    demand: Demand,
    *,
    cost: CostModel | None = None,
    on_run: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a service.

    Args:
        scenario: Who asks and what serves; its rate, length and replicas are the plan's to choose.
        objective: What it objectives.
        demand: What it is planned for.
        cost: Prices of steps and loads; by default those of the scenario's setup.
        on_run: Told of each simulated run before it begins, as words for people.

    Raises:
        ConfigError: The scenario does not fit together, or no rate can keep its objective.
    """
    load_tests = LoadTests(scenario, objective, demand.search_budget, cost=cost, on_run=on_run)
    workload, config = load_tests.workload(1.0), load_tests.config()
    _check_prompts_fit(workload, config, objective)
    most_per_s = most_requests_per_s(workload.requests, config)
    capacity = find_capacity(load_tests.at, start=first_guess(workload, config), tolerance=demand.tolerance)
    if capacity.kept is None:
        return Plan(
            objective=objective,
            demand=demand,
            most_per_s=most_per_s,
            capacity=capacity,
            binds=None,
            usage=None,
            num_replicas=None,
            is_simulated=True,
            served=None,
            cost=None,
        )
    full = usage_of(capacity.kept)
    served, num_replicas, is_simulated = _fit(load_tests, capacity, demand)
    usage = full if served is capacity.kept else usage_of(served)
    return Plan(
        objective=objective,
        demand=demand,
        most_per_s=most_per_s,
        capacity=capacity,
        binds=what_binds(capacity.kept, full, objective),
        usage=usage,
        num_replicas=num_replicas,
        is_simulated=is_simulated,
        served=served,
        cost=_price(scenario, demand, usage, served, num_replicas),
    )


def _check_prompts_fit(workload: Workload, config: SimulationConfig, objective: Objective) -> None:
    """Refuse what would be searched for in vain: a request that is refused counts as forever, at every rate."""
    longest = min(config.base.max_model_len, config.num_pages * config.memory.block_size) - 1
    num_refused = sum(one.num_prompt_tokens > longest for one in workload.requests)
    if num_refused > len(workload.requests) * (1 - objective.percentile / 100):
        raise ConfigError(
            f"{num_refused} of {len(workload.requests)} prompts have more than the {longest} tokens that "
            f"{config.base.name} can take here, and are refused at every rate: cut them "
            f"(--set workload.lengths.bounds.max_prompt={longest}), or take a model of a longer context"
        )


def _fit(load_tests: LoadTests, capacity: Capacity, demand: Demand) -> tuple[LoadTest, int | None, bool]:
    """Return the load test of enough replicas for the traffic, how many that are, and whether they were tried together.

    Where division says that few are enough, and even the most that are tried together break the objective, nothing is
    known of more: there is no number then.
    """
    assert capacity.kept is not None
    if demand.rate is None:
        return capacity.kept, 1, True
    num = max(1, math.ceil(demand.rate / capacity.rate))
    if num > MOST_SIMULATED:
        return capacity.kept, num, False
    for more in range(num, MOST_SIMULATED + 1):
        # Replicas share bursts, which helps, and each sees adapters less often, which does not: so they are tried.
        load_test = load_tests.at(demand.rate, more)
        if load_test.is_kept:
            return load_test, more, True
    return capacity.kept, None, True


def _price(scenario: Scenario, demand: Demand, usage: Usage, served: LoadTest, num_replicas: int | None) -> Cost | None:
    if demand.price_per_hour is None or num_replicas is None:
        return None
    per_hour = demand.price_per_hour * scenario.setup.tensor_parallel * num_replicas
    # Where so many replicas were not tried together, one full one stands for each.
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
