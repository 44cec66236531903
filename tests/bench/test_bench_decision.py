"""The cost of a decision is measured for every policy."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from decision import Scale, decision_table, measure_decision

from manylora.core.scheduling import POLICIES


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Leave this process's collections as quick as they were: a measurement ends with all objects among the others."""
    yield
    gc.freeze()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_decision_is_timed_with_everything_full(policy):
    cost = measure_decision(policy, "lru", Scale(4, 12, 10, 1e6), num_steps=40)
    assert 0 < cost.launch_us <= cost.turn_us
    assert cost.mean_running > 3
    assert cost.admitted_per_step > 0
    table = decision_table([cost, cost], command="x", eviction="lru", num_steps=40, busy_share=0.0)
    assert table.count(f"| {policy} | ") == 1, "rounds of a case are one row"
