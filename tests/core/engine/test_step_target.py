"""Steps cut to time: what a step takes is learnt, and prompts get what decoding leaves of the target."""

from __future__ import annotations

import random

import pytest
from harness import sequence, version

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.costs.online import OnlineCosts, StepLoad
from manylora.core.engine.steps.planner import LEAST_OF_TARGET, LEAST_TOKENS, StepBudget, target_s
from manylora.core.errors import ConfigError
from manylora.core.events import Event, StepFinished
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

PRICES = (0.004, 3e-4, 2e-6, 4e-7)


def load_of(num_tokens: int, sum_rank: int, context: int) -> StepLoad:
    return StepLoad(num_tokens, 1, context, num_tokens, sum_rank, 128)


def teach(costs: OnlineCosts, prices: tuple[float, ...] = PRICES, num_steps: int = 300) -> None:
    rng = random.Random(1)
    for _ in range(num_steps):
        tokens = rng.randint(16, 800)
        load = load_of(tokens, int(tokens * rng.uniform(8, 100)), int(rng.uniform(1e3, 3e4)))
        quantities = 1, load.num_tokens, load.sum_rank, load.context
        costs.observe(load, sum(value * price for value, price in zip(quantities, prices, strict=True)))


def test_costs_are_learnt_from_steps():
    costs = OnlineCosts()
    teach(costs)
    load = load_of(600, 600 * 64, 20_000)
    assert costs.step_s(load) == pytest.approx(0.004 + 0.18 + 0.0768 + 0.008, rel=0.05)
    assert costs.token_s(128) == pytest.approx(3e-4 + 128 * 2e-6, rel=0.1)


def test_costs_follow_a_device_that_slows_down():
    costs = OnlineCosts()
    teach(costs)
    teach(costs, tuple(2 * price for price in PRICES), num_steps=600)
    assert costs.token_s(8) == pytest.approx(2 * (3e-4 + 8 * 2e-6), rel=0.15)


def test_nothing_costs_less_than_nothing():
    """Steps that get shorter with their adapters' rank, as noise may have it, do not make rank a gift."""
    costs = OnlineCosts()
    teach(costs, (0.05, 1e-4, -1e-6, 0.0))
    assert costs.token_s(128) >= costs.token_s(0) > 0


def test_nothing_is_learnt_until_somebody_asks():
    costs = OnlineCosts()
    assert not costs.is_asked
    assert costs.prompt_s(sequence(0, num_prompt=10)) > 0
    assert costs.is_asked


def test_a_budget_is_cut_by_rank():
    costs = OnlineCosts()
    teach(costs)
    small = sequence(0, num_prompt=4000, adapter=version("small", rank=8))
    large = sequence(1, num_prompt=4000, adapter=version("large", rank=128))
    rooms = []
    for one in (small, large):
        budget = StepBudget(2000, costs, step_s=0.1)
        num_tokens = budget.room_for(one)
        budget.spend(one, num_tokens)
        assert budget.is_spent
        rooms.append(num_tokens)
        load = load_of(num_tokens, num_tokens * one.version.rank, num_tokens)
        assert costs.step_s(load) == pytest.approx(0.1, rel=0.05)
    assert rooms[0] > 1.5 * rooms[1]


def test_prompts_keep_a_share_however_many_decode():
    costs = OnlineCosts()
    teach(costs)
    budget = StepBudget(2000, costs, load_of(5000, 0, 0), 0.1)
    assert not budget.is_spent
    assert budget.room_for(sequence(0, num_prompt=400)) >= LEAST_TOKENS


def test_tokens_bound_a_step_with_a_target_as_well():
    budget = StepBudget(100, OnlineCosts(), step_s=1e6)
    assert budget.room_for(sequence(0, num_prompt=400)) == 100


def test_the_fuller_the_pool_the_shorter_the_step():
    assert target_s(0.2, 1.0) == target_s(0.2, 0.3) == 0.2
    assert target_s(0.2, 0.125) == pytest.approx(0.1)
    assert target_s(0.2, 0.0) == pytest.approx(0.2 * LEAST_OF_TARGET)


def test_a_target_is_a_time():
    with pytest.raises(ConfigError, match="step_target_s"):
        SchedulerConfig(step_target_s=0.0)


def test_steps_of_a_simulated_server_keep_to_the_target():
    """Prompts of all ranks at more than can be served: without a target some steps take half as long again."""
    requests = tuple(
        RequestSpec(arrival_s=0.03 * index, num_prompt_tokens=400, num_output_tokens=4, adapter=f"a{index % 2}")
        for index in range(200)
    )
    adapters = (AdapterSpec(name="a0", rank=8), AdapterSpec(name="a1", rank=128))
    slowest = []
    for step_s in (0.12, None):
        scheduler = SchedulerConfig(max_num_batched_tokens=1024, step_target_s=step_s)
        setup = Setup(
            model="llama-7b",
            hardware="a40",
            lora_kernel="s-lora-mbgmm",
            scheduler=scheduler,
            adapters=AdapterConfig(host_bytes=1 << 40),
        )
        events: list[Event] = []
        simulate(Workload(name="w", requests=requests, adapters=adapters), make_config(setup), sinks=(events.append,))
        took = sorted(one.took_s for one in events if isinstance(one, StepFinished))
        slowest.append(took[int(0.98 * len(took))])
    assert slowest[0] < 0.13 < slowest[1]
