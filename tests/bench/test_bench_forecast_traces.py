"""Forecasts on traces: which requests are served when, and when a goal is met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from forecast import OwnSpeed
from forecast_systems import at_load, figures_of, middle
from forecast_traces import BOUNDS, SCALE, page, stretch, verdict
from ratios import Ratio
from sim_profiles import make_profile

from manylora.core.costs.features import step_features
from manylora.core.costs.step_log import StepRecord
from manylora.core.plan import StepPlan
from manylora.lab.costs.profile import RowTimes
from manylora.lab.measure import RequestRecord

NUM_ROWS = 12
PROMPTS = [100 * (row + 1) for row in range(NUM_ROWS - 1)] + [100_000]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace with gaps of 1, 2, 3 seconds and so on."""
    at_s = [row * (row + 1) // 2 for row in range(NUM_ROWS)]
    rows = [
        f"2023-11-16 18:{at // 60:02d}:{at % 60:02d}.0,{prompt},30" for at, prompt in zip(at_s, PROMPTS, strict=True)
    ]
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return file


def test_stretches_follow_each_other_through_the_trace(trace: Path) -> None:
    stretches = [stretch(trace, number, 4) for number in range(3)]
    served = [one.num_prompt_tokens for part in stretches for one in part.requests]
    assert served[:-1] == [round(SCALE * prompt) for prompt in PROMPTS[:-1]]
    assert served[-1] == BOUNDS.max_prompt, "the model's context is shorter than this prompt"
    assert [one.arrival_s for one in stretches[1].requests] == [0.0, 5.0, 11.0, 18.0]
    assert stretches[1].adapters == stretches[0].adapters


def test_a_load_scales_gaps_and_nothing_else(trace: Path) -> None:
    recorded = stretch(trace, 1, 4)
    scaled = at_load(recorded, busy_s=6.0, load=0.5)
    assert [one.arrival_s for one in scaled.requests] == pytest.approx([12 * at / 18 for at in (0, 5, 11, 18)])
    lengths = [[(one.num_prompt_tokens, one.adapter) for one in of.requests] for of in (recorded, scaled)]
    assert lengths[0] == lengths[1]


def test_a_goal_is_met_by_the_whole_interval_alone() -> None:
    def ratio(low: float, high: float) -> Ratio:
        return Ratio(median=(low + high) / 2, low=low, high=high, rounds=())

    assert verdict(ratio(0.95, 1.08), 0.1) == "met"
    assert verdict(ratio(0.89, 1.02), 0.1) == verdict(ratio(0.8, 1.2), 0.1) == "open"
    assert verdict(ratio(1.11, 1.3), 0.1) == verdict(ratio(0.5, 0.89), 0.1) == "missed"


def test_figures_are_those_of_one_run() -> None:
    def run(wait_s: float) -> list[RequestRecord]:
        return [
            RequestRecord(
                request_id=str(number),
                adapter="",
                rank=0,
                num_prompt_tokens=1,
                num_output_tokens=10,
                arrived_at=5.0 + number,
                admitted_at=None,
                first_token_at=5.0 + number + wait_s,
                finished_at=6.0 + number + wait_s,
            )
            for number in range(10)
        ]

    one = figures_of(run(0.5))
    assert one["throughput"] == pytest.approx(100 / 10.5)
    assert one["first token, P50"] == one["first token, P99"] == pytest.approx(0.5)
    found = middle([run(0.5), run(1.0), run(30.0)])
    assert found["first token, P99"] == pytest.approx(1.0), "a slow draw is one run of several"


def test_a_run_of_one_system_keeps_what_was_found_of_others() -> None:
    first = page({"devices": "## devices\n\nnew devices", "cpu": "## cpu\n\n| a | table |"}, "")
    second = page({"vllm": "## vllm\n\nnew"}, first)
    third = page({"cpu": "## cpu\n\nlater"}, second + "\n")
    assert third == first.replace("| a | table |", "later") + "\n\n## vllm\n\nnew"
    assert third.index("## cpu") < third.index("## devices") < third.index("## vllm")


def test_a_runs_own_speed_is_that_of_each_window_and_of_the_last_one_when_idle() -> None:
    rows = RowTimes(knots=(0,), row_s=(0.0,))
    profile = make_profile(terms={"step": 0.1}, rows=rows, turn_s=0.0, turn_sequence_s=0.0, noise={})
    features = step_features(StepPlan(step_id=0, sequences=()))
    steps = [
        StepRecord(step_id=number, launched_at=100.0 + at, ended_at=100.0 + at + took, device_s=None, features=features)
        for number, (at, took) in enumerate([(0.5, 0.1), (1.0, 0.3), (2.1, 0.05), (8.0, 0.4)])
    ]
    speed = OwnSpeed.of(profile, steps, 100.0)
    expected = [2.0, 2.0, 0.5, 0.5, 4.0, 4.0]
    assert [speed.factor(now) for now in (0.0, 1.9, 2.0, 7.9, 8.0, 50.0)] == pytest.approx(expected)
    later = replace(speed, began_s=7.0)
    assert [later.factor(7.0 + now) for now in (0.0, 1.9, 2.0, 7.9, 8.0, 50.0)] == pytest.approx(expected)
