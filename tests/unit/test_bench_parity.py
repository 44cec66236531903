"""The parity benchmark's arithmetic: what it calls alike is alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import parity
import pytest
from harness import version
from sim_profiles import make_profile, sweep

from manylora.clock import VirtualClock
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.engine.ports import EngineParts
from manylora.engine.step_log import LogLine
from manylora.sim.build import build_simulated_parts
from manylora.sim.calibrate import fit_profile
from manylora.sim.fitted import FittedCost
from manylora.types import AdapterVersion


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
        self.parts: EngineParts = build_simulated_parts(self.config, VirtualClock())
        self.folders = [Path(f"adapter-{index}") for index in range(parity.NUM_ADAPTERS)]

    def read_adapters(self) -> list[AdapterVersion]:
        return [version(f"key-{index}", num_pages=5 + 10 * (index % 4)) for index in range(parity.NUM_ADAPTERS)]


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
    errors = parity.latencies(first, again, [again])
    assert all(one["error"] == one["error_plain"] == 0.0 for by in errors.values() for one in by.values())


def test_a_slower_run_is_not(outcomes: Sequence[parity.Outcome]):
    first, _, slower = outcomes
    alike = parity.decisions(first, slower)
    assert 0.0 < alike["evictions of the same adapters"] < 1.0
    errors = parity.latencies(first, slower, [slower])
    assert errors["tbt"]["p50"]["error"] > 0.05
    counts = parity.counts(first)
    assert counts["evictions of adapters"] > 0
    assert counts["tokens per second"] > 0


def test_steps_are_held_against_the_profile():
    lines: list[LogLine] = sweep(make_profile(), seconds=0.6)
    by_kind = parity.step_errors(fit_profile(lines), lines)
    assert by_kind["decode"]["foretold_over_measured"] == pytest.approx(1.0, abs=1e-3)
    assert parity.drift(lines, lines) == pytest.approx(1.0, abs=1e-3)
    assert parity.drift(lines, sweep(make_profile(terms={}), seconds=0.6)) < 0.9
