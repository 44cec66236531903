"""The planner's benchmarks, their own arithmetic: where a live percentile crosses its limit."""

from __future__ import annotations

import pytest
from planner_live import LIMIT_S, Served, capacities, capacity


def served(*points: tuple[float, list[float]]) -> list[Served]:
    """Return rates with one time in each round: its own percentile."""
    return [Served(0.0, rate, 0.0, [[live_s] for live_s in rounds]) for rate, rounds in points]


def test_the_capacity_is_between_the_rates_that_enclose_the_limit() -> None:
    steps = served((1.0, [LIMIT_S / 4]), (2.0, [LIMIT_S / 2]), (8.0, [LIMIT_S * 2]))
    assert capacity(steps, [0]) == pytest.approx(5.0), "half way in logarithms of the time"
    assert capacity(served((1.0, [LIMIT_S]), (2.0, [LIMIT_S * 3])), [0]) == pytest.approx(1.0)


def test_a_limit_that_is_not_enclosed_is_said_so() -> None:
    assert capacities(served((1.0, [LIMIT_S / 4]), (2.0, [LIMIT_S / 2]))) is None
    assert capacities(served((1.0, [LIMIT_S * 2]), (2.0, [LIMIT_S * 3]))) is None
    # Only some resamplings of the rounds reach it.
    assert capacities(served((1.0, [LIMIT_S / 4] * 2), (2.0, [LIMIT_S / 2, LIMIT_S * 3]))) is None


def test_the_interval_holds_the_rounds() -> None:
    found = capacities(served((1.0, [LIMIT_S / 4] * 5), (2.0, [LIMIT_S * factor for factor in (1.5, 2, 2, 3, 4)])))
    assert found is not None
    middle, low, high = found
    assert low <= middle <= high
