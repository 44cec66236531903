"""Forecasts and the grid of readings, their own arithmetic."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from chameleon_readings import LEAST_LOAD, LIMIT_S, MOST_LOAD, next_load
from forecast import BLOCK, WINDOW_S, DrawnSpeed, interval, over_windows, windows_of
from hypothesis import given
from hypothesis import strategies as st

from manylora.lab.experiments.findings import crossing


def test_a_drawn_speed_is_made_of_measured_stretches() -> None:
    measured = [float(number) for number in range(50)]
    drawn = DrawnSpeed(measured, Random(1))
    series = [drawn.factor((place + 0.5) * WINDOW_S) for place in range(10 * BLOCK)]
    for block in zip(*[iter(series)] * BLOCK, strict=True):
        assert np.diff(block).tolist() == [1.0] * (BLOCK - 1), "a stretch keeps its order"
    assert len({series[place] for place in range(0, len(series), BLOCK)}) > 3, "stretches differ"
    assert DrawnSpeed([1.5], Random(0)).factor(1000.0) == 1.5, "a series shorter than a block repeats"


def test_windows_without_steps_have_no_speed() -> None:
    at = np.array([10.0, 10.5, 12.5, 30.0])
    windows = windows_of(at)
    assert windows.tolist() == [0, 0, 1, 2]
    assert over_windows(windows, np.array([1.0, 3.0, 5.0, 2.0]), np.ones(4)).tolist() == [2.0, 5.0, 2.0]


def test_an_interval_is_as_wide_as_runs_differ() -> None:
    rng = np.random.default_rng(0)
    alike = [rng.exponential(1.0, 400) for _ in range(5)]
    unlike = [run * factor for run, factor in zip(alike, (0.5, 0.8, 1.0, 1.5, 3.0), strict=True)]
    (middle, low, high), (_, wide_low, wide_high) = interval(alike, 99), interval(unlike, 99)
    assert low <= middle <= high
    assert wide_high - wide_low > 2 * (high - low)


@given(st.lists(st.floats(2.0, 25.0), min_size=1, max_size=5))
def test_the_search_for_capacities_ends_with_all_of_them_enclosed(capacities: list[float]) -> None:
    """Whatever the seeds serve, few loads are run, and each seed's capacity lies between two that are near."""

    def tails(load: int) -> list[float]:
        return [LIMIT_S * load / capacity for capacity in capacities]

    runs = {load: tails(load) for load in (6, 8, 9)}
    while (load := next_load(runs)) is not None:
        assert load not in runs
        assert LEAST_LOAD <= load <= MOST_LOAD
        runs[load] = tails(load)
    for seed, capacity in enumerate(capacities):
        found = crossing([(load, runs[load][seed]) for load in sorted(runs)], LIMIT_S)
        assert (found is not None) == (LEAST_LOAD <= capacity < MOST_LOAD)
        assert found is None or found == pytest.approx(capacity, rel=0.02)
