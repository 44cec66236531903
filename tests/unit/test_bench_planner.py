"""The planner's benchmarks, their own arithmetic: where a live percentile crosses its limit."""

from __future__ import annotations

import math

import pytest
from planner_live import LIMIT_S, Served, crossing


def served(*points: tuple[float, float]) -> list[Served]:
    return [Served(0.0, rate, 0.0, [], live_s) for rate, live_s in points]


def test_the_crossing_is_between_the_rates_that_enclose_the_limit() -> None:
    assert crossing(served((1.0, LIMIT_S / 4), (2.0, LIMIT_S / 2), (8.0, LIMIT_S * 2))) == pytest.approx(4.0)
    assert crossing(served((1.0, LIMIT_S), (2.0, LIMIT_S * 3))) == pytest.approx(1.0)


def test_a_limit_that_is_not_enclosed_is_said_so() -> None:
    assert crossing(served((1.0, LIMIT_S / 4), (2.0, LIMIT_S / 2))) == math.inf
    assert crossing(served((1.0, LIMIT_S * 2), (2.0, LIMIT_S * 3))) == 0.0
