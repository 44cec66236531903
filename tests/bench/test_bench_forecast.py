"""Forecasts: their own arithmetic."""

from __future__ import annotations

from random import Random

import numpy as np
from forecast import BLOCK, WINDOW_S, DrawnSpeed, interval, over_windows, windows_of


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
