"""The parity benchmark's arithmetic: what it calls alike is alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
from harness import version
from parity_columns import COLUMNS, Columns, Speed
from parity_table import page as page_of
from sim_profiles import make_profile, sweep

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LoggedExecutor, LogLine
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, Request
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.model import FixedCost
from manylora.lab.costs.profile import CostProfile, DriftComponent, Noise, SpeedDrift
from manylora.lab.sim.build import simulated_parts
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.lab.sim.run.simulation import SimulationConfig

Requests = list[tuple[float, Request]]


@dataclass
class SimulatedBench(parity.Bench):
    """The benchmark without a live engine."""

    config: EngineConfig = field(
        default_factory=lambda: EngineConfig(
            model=ModelConfig(model="none"),
            memory=MemoryConfig(num_pages=160),
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
            adapters=AdapterConfig(max_cpu_loras=40),
        )
    )

    def __post_init__(self) -> None:
        self.parts: EngineParts = simulated_parts(
            SimulationConfig(base=base_shape("llama-3-8b"), cost=FixedCost(), num_pages=160), "synthetic"
        )
        self.folders = [Path(f"adapter-{index}") for index in range(parity.NUM_ADAPTERS)]

    def read_adapters(self) -> list[AdapterVersion]:
        sizes = [5 + 10 * (index % 4) for index in range(parity.NUM_ADAPTERS)]
        page_bytes = self.parts.base.page.num_bytes
        return [
            replace(version(f"key-{index}", num_pages=size), host_bytes=size * page_bytes)
            for index, size in enumerate(sizes)
        ]


@pytest.fixture(scope="module")
def outcomes() -> Sequence[parity.Outcome]:
    bench, profile = SimulatedBench(), make_profile()
    versions = bench.read_adapters()
    requests = parity.make_requests(120, parity.LOAD * parity.capacity(bench, profile, versions, 120))
    slower = make_profile(terms={**profile.terms, "step": 4e-3})
    costs = [FittedCost(profile), FittedCost(profile, random.Random(0)), FittedCost(slower)]
    return [bench.simulate(cost, versions, requests) for cost in costs]


def test_equal_runs_are_alike_throughout(outcomes: Sequence[parity.Outcome]):
    first, again, _ = outcomes  # without noise in the profile there is nothing to draw
    assert first.events == again.events
    alike = parity.decisions(first, again)
    assert all(value == pytest.approx(1.0) for name, value in alike.items() if "pre-empted" not in name)
    assert alike["pre-empted in both, of pre-empted in either"] in (0.0, 1.0)
    found = parity.latencies(first, {"mean prices": [again]})
    errors = [one["columns"]["mean prices"]["error"] for by in found.values() for one in by.values()]
    assert set(errors) == {0.0}


def test_a_slower_run_is_not(outcomes: Sequence[parity.Outcome]):
    first, _, slower = outcomes
    alike = parity.decisions(first, slower)
    assert 0.0 < alike["evictions of the same adapters"] < 1.0
    found = parity.latencies(first, {"jitter": [slower, first, slower]})["tbt"]["p50"]["columns"]["jitter"]
    assert found["error"] > 0.05
    assert (found["low"], found["seeds_below_live"]) == (parity.figure(first, "tbt", "p50"), 0.0)
    counts = parity.counts(first)
    assert counts["evictions of adapters"] > 0
    assert counts["tokens per second"] > 0


def test_the_second_sweep_is_held_against_the_first():
    lines: list[LogLine] = sweep(make_profile(), seconds=0.6)
    assert parity.drift(lines, lines) == pytest.approx(1.0, abs=1e-3)
    assert parity.drift(lines, sweep(make_profile(terms={}), seconds=0.6)) < 0.9


def test_the_speed_around_a_moment_is_measured_over_predicted():
    at, took, predicted = np.arange(10.0), np.repeat([1.0, 3.0], 5), np.ones(10)
    speed = Speed(at, took, predicted, window_s=2.0)
    assert [speed.factor(now) for now in (1.0, 4.4, 8.0)] == [1.0, 2.0, 3.0]
    assert speed.factor(99.0) == 3.0  # nothing there: the nearest step
    assert list(speed.of_others()[[1, 4, 5, 8]]) == [1.0, 2.0, 2.0, 3.0]


@pytest.fixture(scope="module")
def unsteady_run() -> tuple[SimulatedBench, parity.Outcome, list[LogLine], CostProfile, Requests]:
    """A "live" run on a machine that is slow and quick for seconds, and the profile of a steadier hour."""
    noise = {kind: Noise(mean=1.0, quantiles=(0.95, 1.0, 1.05)) for kind in ("decode", "prompt")}
    quiet = make_profile(noise=noise)
    slow = make_profile(
        noise=noise, speed_drift=SpeedDrift(components=(DriftComponent(size=0.4, length_s=8.0),), noise=noise)
    )
    bench = SimulatedBench()
    versions = bench.read_adapters()
    requests = parity.make_requests(300, 0.7 * parity.capacity(bench, quiet, versions, 200))
    cost = FittedCost(slow, random.Random(1))
    lines: list[LogLine] = [parity.header(bench.parts)]
    executor = SimulatedExecutor(
        cost, vocab_size=parity.VOCAB_SIZE, choose=parity.choose, interference=cost.interference, speed=cost.speed()
    )
    live = bench.run(LoggedExecutor(executor, lines.append), VirtualClock(), 0.0, versions, requests)
    return bench, live, lines, quiet, requests


def test_columns_that_know_more_come_nearer(unsteady_run: tuple[Any, ...]):
    bench, live, lines, quiet, requests = unsteady_run
    columns = Columns(quiet, lines, 0.0, vocab_size=parity.VOCAB_SIZE, choose=parity.choose)
    outcomes = {
        name: [bench.run(columns.executor(name, 0), VirtualClock(), 0.0, bench.read_adapters(), requests)]
        for name in COLUMNS
    }
    found = parity.latencies(live, outcomes)
    ttft = {name: abs(one["error"]) for name, one in found["ttft"]["p99"]["columns"].items()}
    assert ttft["speed replayed"] < 0.15 < 0.4 < ttft["mean prices"]
    assert abs(found["tbt"]["p99"]["columns"]["speed replayed"]["error"]) < 0.1
    errors = columns.step_errors()
    assert set(errors) >= {"decode", "mixed", "all"}
    assert errors["all"]["r2_sweeps_even"] > 0.9 > 0.7 > errors["all"]["r2_sweeps"]
    assert errors["all"]["r2_folds_even"] > errors["all"]["r2_folds"]
    figures = {
        "command": "a test",
        "machine": "none",
        "adapters": 50,
        "ranks": parity.RANKS,
        "num_pages": 160,
        "requests": 300,
        "requests_per_s": 9.0,
        "share_of_capacity": 0.6,
        "live_s": 60.0,
        "simulated_in_s": 0.1,
        "load_average_before": 0.0,
        "drift": 1.0,
        "replayed": {"same": 9, "events": 9},
        "components": {"sweeps": parity.components(quiet), "live": parity.components(columns.whole)},
        "latencies": found,
        "counts": {name: parity.counts(one) for name, (one, *_) in {"live": [live], **outcomes}.items()},
        "decisions": {name: parity.decisions(live, one) for name, (one,) in outcomes.items()},
        "steps": errors,
        "calibration_steps": [1, 2],
        "profile_errors": [{name: getattr(one, name) for name in one.__struct_fields__} for one in quiet.errors],
    }
    page = page_of(figures)
    assert "Drift in the sweeps: none." in page
    assert all(len(row.split("|")) == len(COLUMNS) + 4 for row in page.splitlines() if row.startswith("| between"))
