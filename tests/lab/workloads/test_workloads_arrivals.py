"""Arrival processes: their rates, from the first second on, and their ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manylora.core.errors import ConfigError
from manylora.lab.workloads.arrivals import (
    ArrivalProcess,
    Extent,
    GammaArrivals,
    OnOffArrivals,
    PoissonArrivals,
    ReplayArrivals,
    StepArrivals,
    WeibullArrivals,
)
from manylora.lab.workloads.callers import GammaCallers

PROCESSES = [
    PoissonArrivals(rate=5.0),
    GammaArrivals(rate=5.0, cov=0.5),
    GammaArrivals(rate=5.0, cov=4.0),
    GammaArrivals(rate=5.0, cov=12.0),
    WeibullArrivals(rate=5.0, shape=0.4),
    OnOffArrivals(rate=5.0, on_s=3.0, off_s=9.0),
    StepArrivals(rates=(0.0, 10.0), step_s=2.0),
]


@pytest.mark.parametrize("process", PROCESSES, ids=str)
@pytest.mark.parametrize("duration_s", [2.0, 40.0])
def test_the_rate_is_the_rate_however_short_the_look(process: ArrivalProcess, duration_s: float) -> None:
    """A process that starts at a renewal, or whose gaps are clipped, runs hot: by 71 arrivals at a CoV of 12."""
    if isinstance(process, StepArrivals) and duration_s == 2.0:
        duration_s = 4.0  # a whole cycle
    extent = Extent(duration_s=duration_s)
    counts = [len(process.arrive(extent, np.random.default_rng([seed, 7])).times) for seed in range(2500)]
    error = float(np.std(counts)) / math.sqrt(len(counts))
    assert abs(float(np.mean(counts)) - 5.0 * duration_s) < 4 * error


@pytest.mark.parametrize(
    ("kind", "name", "least", "most"), [(GammaArrivals, "cov", 1e-6, 1e6), (WeibullArrivals, "shape", 1e-2, 1e6)]
)
def test_gaps_that_no_number_holds_are_refused(kind: type[Any], name: str, least: float, most: float) -> None:
    """They ended in tracebacks of the arithmetic; at the bounds there are times."""
    for value in (least / 10, 1e-200, most * 10, 1e200):
        with pytest.raises(ConfigError, match=f"Got {name} = "):
            kind(rate=1.0, **{name: value})
    for value in (least, most):
        for extent in (Extent(num_requests=20), Extent(num_requests=20, duration_s=9.0)):
            assert not np.isnan(kind(rate=1.0, **{name: value}).arrive(extent, np.random.default_rng(0)).times).any()


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_times_are_in_order_inside_the_extent_and_repeatable(process: ArrivalProcess) -> None:
    for extent in (Extent(num_requests=300), Extent(duration_s=50.0), Extent(num_requests=40, duration_s=50.0)):
        times = process.arrive(extent, np.random.default_rng(3)).times
        assert np.all(np.diff(times) >= 0) and np.all(times >= 0)
        assert len(times) <= (extent.num_requests or math.inf) and np.all(times < (extent.duration_s or math.inf))
        if extent.duration_s is None:
            assert len(times) == extent.num_requests
        assert np.array_equal(times, process.arrive(extent, np.random.default_rng(3)).times)


@pytest.mark.parametrize("process", [*PROCESSES[:6], GammaCallers(rate=0.5, cov=4.0, num_callers=10)], ids=str)
def test_so_many_requests_take_as_long_as_the_rate_says(process: ArrivalProcess) -> None:
    ends = [
        float(process.arrive(Extent(num_requests=20), np.random.default_rng(seed)).times[-1]) for seed in range(4000)
    ]
    assert abs(float(np.mean(ends)) - 20 / 5.0) < 4 * float(np.std(ends)) / math.sqrt(len(ends))


@pytest.mark.parametrize(("process", "cov"), [(PROCESSES[0], 1.0), (PROCESSES[1], 0.5), (PROCESSES[2], 4.0)], ids=str)
def test_gaps_vary_as_asked(process: ArrivalProcess, cov: float) -> None:
    gaps = np.diff(process.arrive(Extent(num_requests=40_000), np.random.default_rng(0)).times)
    assert float(np.std(gaps) / np.mean(gaps)) == pytest.approx(cov, rel=0.1)


def test_callers_are_independent_and_each_has_its_rate_and_gaps() -> None:
    arrived = GammaCallers(rate=2.0, cov=3.0, num_callers=3).arrive(
        Extent(duration_s=20_000.0), np.random.default_rng(1)
    )
    assert arrived.callers is not None and arrived.num_callers == 3
    for caller in range(3):
        gaps = np.diff(arrived.times[arrived.callers == caller])
        assert np.mean(gaps) == pytest.approx(0.5, rel=0.1)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(3.0, rel=0.1)
    with pytest.raises(ConfigError, match="num_callers"):
        GammaCallers(rate=1.0, cov=1.0, num_callers=0)


def test_steps_are_silent_where_their_rate_is_zero() -> None:
    times = StepArrivals(rates=(0.0, 4.0), step_s=5.0).arrive(Extent(num_requests=500), np.random.default_rng(0)).times
    assert np.all(times % 10.0 >= 5.0)
    silent = StepArrivals(rates=(0.0, 4.0), step_s=5.0).arrive(Extent(duration_s=3.0), np.random.default_rng(0))
    assert len(silent.times) == 0


def test_on_off_is_silent_most_of_the_time() -> None:
    process = OnOffArrivals(rate=4.0, on_s=2.0, off_s=6.0)
    times = process.arrive(Extent(duration_s=4000.0), np.random.default_rng(0)).times
    seconds = len(set(np.floor(times).astype(int).tolist()))
    assert 0.25 < seconds / 4000 < 0.45  # on for a quarter, and bursts end inside seconds


def test_replay_keeps_the_shape_at_any_rate_and_begins_again(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:00:0{second}.{part}000000,10,5" for second, part in ((0, 0), (1, 0), (1, 5), (4, 5))]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    rng = np.random.default_rng(0)
    once = ReplayArrivals(file=file).arrive(Extent(), rng).times
    assert once.tolist() == pytest.approx([0.0, 1.0, 1.5, 4.5])
    twice = ReplayArrivals(file=file, rate=2.0).arrive(Extent(num_requests=8), rng).times
    assert np.diff(twice[:4]).tolist() == pytest.approx([1 / 3, 1 / 6, 1.0])
    assert twice[4:].tolist() == pytest.approx((twice[:4] + 2.0).tolist())  # four requests at two per second
    assert len(ReplayArrivals(file=file, rate=2.0).arrive(Extent(duration_s=100.0), rng).times) == 200


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_wrong_rate_is_named(rate: float) -> None:
    with pytest.raises(ConfigError, match="Got rate = "):
        PoissonArrivals(rate=rate)


def test_a_process_without_an_end_needs_one() -> None:
    with pytest.raises(ConfigError, match="neither num_requests nor duration_s, but 'poisson'"):
        PoissonArrivals(rate=1.0).arrive(Extent(), np.random.default_rng(0))
