"""Cost profiles: fitting what is known finds it again, and the fitted model charges what the profile says."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from harness import version
from sim_profiles import ROWS, TRUTH, make_profile, sweep

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.costs.step_log import LoadRecord, LogHeader, LogLine, StepRecord
from manylora.core.errors import ConfigError
from manylora.core.plan import AdapterLoad, PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, SamplingParams, Tier
from manylora.lab.bench.sweep import draw_burst
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.calibrate import fit_profile, noise_of, split_log
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.model import FixedCost
from manylora.lab.costs.profile import DriftComponent, LoadCost, Noise, RowTimes, SpeedDrift, StepCost, read_profile
from manylora.lab.sim.run.executor import SimulatedExecutor


def steps_of(lines: list[LogLine]) -> list[StepRecord]:
    return [line for line in lines if isinstance(line, StepRecord)]


def test_a_fit_finds_what_the_steps_were_made_of():
    truth = make_profile()
    lines = sweep(truth)
    fitted = fit_profile(lines, command="a test")
    assert {error.regime for error in fitted.errors} == {"decode", "prefill", "mixed"}
    assert all(error.r2 > 0.98 and error.p90_error < 0.05 for error in fitted.errors)
    assert (fitted.machine, fitted.command, fitted.num_pages) == ("a machine", "a test", truth.num_pages)
    for tier, cost in fitted.loads.items():
        assert cost.num_measured > 0, tier
        assert cost.byte_s == pytest.approx(truth.loads[tier].byte_s, rel=0.01)
        assert cost.fixed_s == pytest.approx(truth.loads[tier].fixed_s, rel=0.01)
    # Steps of other bursts, too, cost what they should.
    true_cost, cost = StepCost(truth.terms, truth.rows), StepCost(fitted.terms, fitted.rows)
    for step in steps_of(sweep(truth, seconds=0.5)):
        expected = true_cost.seconds(step.features) + truth.turn_s + truth.turn_sequence_s * step.features.num_sequences
        assert cost.seconds(step.features) + fitted.turn_s == pytest.approx(expected, rel=0.03)


def test_which_law_a_kernel_follows_is_found():
    """Padded kernels grow with the batch times the largest rank, others with the sum of ranks."""
    base = {"step": 3e-3, "context_token": 2e-7, "prompt_pair": 5e-9, "prompt_row_rank": 4e-7}
    padded = fit_profile(sweep(make_profile(terms={**base, "padded_row_rank": 4e-6}), seconds=2.0))
    ragged = fit_profile(sweep(make_profile(terms={**base, "rank": 2e-5}), seconds=2.0))
    assert padded.terms["padded_row_rank"] == pytest.approx(4e-6, rel=0.02)
    assert padded.terms["rank"] < 1e-7
    assert ragged.terms["rank"] == pytest.approx(2e-5, rel=0.02)
    assert ragged.terms["padded_row_rank"] < 1e-8


def test_what_a_change_of_the_batch_costs_is_found():
    base = {"step": 3e-3, "context_token": 2e-7, "prompt_pair": 5e-9, "rank": 2e-5}
    fitted = fit_profile(sweep(make_profile(terms={**base, "changed": 8e-4}), seconds=2.0))
    assert fitted.terms["changed"] == pytest.approx(8e-4, rel=0.05)
    assert fit_profile(sweep(make_profile(terms=base), seconds=2.0)).terms["changed"] < 2e-5


def test_how_much_loads_slow_down_steps_is_found_too():
    truth = make_profile(interference={"host": 0.5, "device": 0.25})
    fitted = fit_profile(sweep(truth, seconds=2.0))
    assert fitted.interference["host"] == pytest.approx(0.5, rel=0.05)
    assert fitted.interference["device"] == pytest.approx(0.25, rel=0.1)
    assert all(error.r2 > 0.98 for error in fitted.errors)


def test_a_step_that_loads_to_both_tiers_did_not_delay_leaves_noise_that_can_be_drawn():
    """Loads to either tier delay steps by nine tenths of their duration, but for one step beside both."""
    lines, content = [LogHeader(base=make_profile().base, num_pages=2)], step_features(plan())
    for number in range(90):
        tiers = ((), (Tier.HOST,), (Tier.DEVICE,))[number // 3 % 3] if number != 9 else (Tier.HOST, Tier.DEVICE)
        load_s, took_s = (0.01, 0.01) if number == 9 else (0.005, 0.01 + 0.0045 * len(tiers))
        at = {"launched_at": float(number), "device_s": None}
        lines.append(StepRecord(step_id=number, ended_at=number + took_s, features=content, **at))
        key = AdapterKey("a")
        lines += [LoadRecord(adapter=key, tier=tier, num_bytes=1, ended_at=number + load_s, **at) for tier in tiers]
    fitted = fit_profile(lines)
    assert min(quantile for noise in fitted.noise.values() for quantile in noise.quantiles) > 0
    cost = FittedCost(fitted, random.Random(0))
    assert all(cost.features_time_s(content) > 0 for _ in range(500))


@pytest.mark.parametrize(
    ("load_at", "takes_s", "expected"),
    [
        (0.0, 0.4, 1.2),  # beside it for 0.4 s: half of them lost
        (0.5, 9.0, 1.5),  # half a second is left, and takes two halves
        (1.0, 9.0, 1.0),  # the step is over
    ],
)
def test_a_load_drags_the_step_beside_it(load_at: float, takes_s: float, expected: float):
    cost = FixedCost(step_s=1.0, token_s=0.0, copy_bytes_per_s=1e6)
    weights = replace(version("a"), host_bytes=int(takes_s * 1e6))
    executor = SimulatedExecutor(cost, vocab_size=10, interference={Tier.DEVICE: 0.5})
    if load_at == 0.0:
        executor.load_adapter(AdapterLoad(version=weights, tier=Tier.DEVICE), 0.0)
    step = executor.launch(plan(), 0.0)
    if load_at > 0.0:
        executor.load_adapter(AdapterLoad(version=weights, tier=Tier.DEVICE), load_at)
    assert step.ready_at == pytest.approx(expected)


def test_runs_in_one_log_do_not_overlap():
    lines = sweep(make_profile(), seconds=0.3)
    _, steps, loads = split_log([*lines, *lines])
    assert len(steps) == 2 * len(steps_of(lines))
    last = max(step.ended_at for step in steps_of(lines))
    assert all(step.launched_at > last for step in steps[len(steps) // 2 :])
    assert loads[-1].took_s == pytest.approx(loads[len(loads) // 2 - 1].took_s)


def test_noise_is_measured_and_drawn_again():
    # Steps are held up by half of their time, one in ten.
    noisy = make_profile(noise={"decode": Noise(mean=1.05, quantiles=(1.0,) * 10 + (1.5,))})
    fitted = fit_profile(sweep(noisy, rng=random.Random(1)))
    assert fitted.noise["decode"].mean == pytest.approx(1.025, abs=0.02)
    assert fitted.noise["decode"].quantiles[50] == pytest.approx(1.0, abs=0.02)
    assert fitted.noise["decode"].quantiles[-1] == pytest.approx(1.5, abs=0.1)
    assert fitted.noise["prompt"].mean == pytest.approx(1.0, abs=0.01)


def plan(num_sequences: int = 1, *, num_tokens: int = 1, rank: int = 8) -> StepPlan:
    parts = [
        PlannedSequence(
            seq_id=index,
            tokens=range(100 + num_tokens),
            num_prompt_tokens=100,
            start=100,
            num_tokens=num_tokens,
            pages=(),
            adapter=AdapterKey(f"a{index % 3}"),
            rank=rank,
            sampling=SamplingParams(),
            is_sampled=True,
            seed=0,
        )
        for index in range(num_sequences)
    ]
    return StepPlan(step_id=0, sequences=tuple(parts))


def test_a_step_costs_the_sum_of_its_terms():
    cost = FittedCost(make_profile())
    sequences = 3e-3 + 3e-5 + 2e-7 * 303 + 3e-4 + 2e-5 * 24 + 1e-6 * 24 + 2e-4 + 3e-6
    assert cost.step_time_s(plan(3)) == pytest.approx(sequences)
    chunk = 3e-3 + (16e-5 + 48 * 4e-5 + 36 * 8e-5) + 5e-9 * 15050 + 1e-4 + 2e-5 * 8 + 4e-7 * 800 + 2e-4 + 1e-6
    assert cost.step_time_s(plan(num_tokens=100)) == pytest.approx(chunk)


def test_padded_kernels_pay_for_the_largest_rank_in_every_row():
    cost = FittedCost(make_profile(terms={"padded_row_rank": 1e-6}, turn_s=0.0, turn_sequence_s=0.0))
    mixed = StepPlan(step_id=0, sequences=(*plan(5, rank=8).sequences, *plan(1, rank=64).sequences))
    assert cost.step_time_s(mixed) == pytest.approx(6e-5 + 6 * 64e-6)


def test_a_load_costs_by_its_bytes_and_tier():
    cost = FittedCost(make_profile())
    weights = replace(version("a"), host_bytes=10_000_000, disk_bytes=20_000_000)
    assert cost.load_time_s(AdapterLoad(version=weights, tier=Tier.HOST)) == pytest.approx(0.022)
    assert cost.load_time_s(AdapterLoad(version=weights, tier=Tier.DEVICE)) == pytest.approx(0.002)


def test_jitter_comes_from_a_seed_and_averages_to_the_mean():
    noise = {"decode": Noise(mean=1.25, quantiles=(0.5, 1.0, 2.0))}
    profile = make_profile(noise=noise)
    plain = FittedCost(make_profile()).step_time_s(plan())
    assert FittedCost(profile).step_time_s(plan()) == pytest.approx(1.25 * plain)
    cost, again = FittedCost(profile, random.Random(5)), FittedCost(profile, random.Random(5))
    times = [cost.step_time_s(plan()) for _ in range(4000)]
    assert times[:10] == [again.step_time_s(plan()) for _ in range(10)]
    assert sum(times) / len(times) == pytest.approx((0.75 + 1.5) / 2 * plain, rel=0.03)
    assert 0.5 * plain <= min(times) <= max(times) <= 2 * plain


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path):
    profile = make_profile(noise={"decode": Noise(mean=1.0, quantiles=(0.9, 1.0, 1.3))})
    path = tmp_path / "profile.json"
    profile.write(path)
    assert read_profile(path) == profile
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Cannot read the cost profile"),
        ("{}", r"is not a cost profile of `manylora calibrate`"),
        ('"format": 9', "format 9, expected 1"),
        ('"steps": 1', "has a term 'steps'"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str | None, message: str):
    path = tmp_path / "profile.json"
    if content == '"format": 9':
        make_profile(format=9).write(path)
    elif content == '"steps": 1':
        make_profile(terms={"steps": 1.0}).write(path)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"terms": {"step": -1.0}}, "a cost of -1.0"),
        ({"rows": RowTimes(knots=(), row_s=())}, "knots that rise from 0"),
        ({"rows": RowTimes(knots=(0, 4), row_s=(1.0,))}, "a cost for each"),
        ({"rows": RowTimes(knots=(0, 4, 2), row_s=(1.0, 1.0, 1.0))}, "knots that rise"),
        ({"loads": {"host": LoadCost(fixed_s=1.0, byte_s=0.0)}}, "loads to host, expected host and device"),
        ({"interference": {"moon": 0.1}}, "expected shares below 1 of host and device"),
        ({"interference": {"host": 1.0}}, "expected shares below 1"),
        ({"noise": {"decode": Noise(mean=1.0, quantiles=())}}, "noise without quantiles"),
        (
            {"speed_drift": SpeedDrift(components=(DriftComponent(size=0.1, length_s=0.0),), noise={})},
            "lengths above 0",
        ),
    ],
)
def test_what_no_measurement_gives_is_refused(tmp_path: Path, change: dict[str, object], message: str):
    """It ended simulations in tracebacks, or was taken for nothing."""
    make_profile(**change).write(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path / "profile.json")


def header(**fields: str) -> LogHeader:
    return LogHeader(base=base_shape("llama-3-8b"), num_pages=9, **fields)


def test_a_profile_is_of_one_engine():
    with pytest.raises(ConfigError, match="of different engines"):
        split_log([header(machine="a"), header(machine="b")])
    with pytest.raises(ConfigError, match="The log has no header"):
        split_log([])
    with pytest.raises(ConfigError, match=r"Got 0 steps .*expected 40"):
        fit_profile([header()])


def test_loads_are_fitted_without_their_wait_for_the_link():
    features = step_features(plan())
    steps = [
        StepRecord(step_id=index, launched_at=index, ended_at=index + 0.5, device_s=None, features=features)
        for index in range(80)
    ]

    def load(at: float, num_bytes: int, ended_at: float, error: str | None = None) -> LoadRecord:
        return LoadRecord(
            adapter=AdapterKey("a"),
            tier=Tier.DEVICE,
            num_bytes=num_bytes,
            launched_at=at,
            ended_at=ended_at,
            device_s=None,
            error=error,
        )

    loads = [load(0, 100, 1.0), load(0.5, 200, 3.0), load(4, 300, 7.0), load(8, 900, 8.1, "gone"), load(9, 50, 9.5)]
    profile = fit_profile([header(), *steps, *loads])
    assert profile.loads["device"].num_measured == 4
    assert profile.loads["device"].byte_s == pytest.approx(0.01, rel=1e-3)
    assert profile.loads["host"].num_measured == 0


def test_bursts_fit_the_engine_they_are_drawn_for():
    rng = random.Random(0)
    for _ in range(300):
        burst = draw_burst(rng, max_num_seqs=16, max_context=64, max_tokens=256, num_adapters=4, step_s=0.1)
        assert 1 <= burst.num_requests <= 16
        assert burst.num_prompt_tokens >= 2
        assert burst.num_prompt_tokens + burst.num_output_tokens <= 64
        assert burst.num_requests * burst.num_prompt_tokens <= 256
        assert len(set(burst.adapters)) == len(burst.adapters) <= 4


def test_features_of_no_step_are_nothing():
    nothing = StepFeatures(**dict.fromkeys(StepFeatures.__struct_fields__, 0))
    assert StepCost(TRUTH, ROWS).seconds(nothing) == TRUTH["step"]


def test_one_measurement_that_stands_alone_does_not_make_many():
    """A load that took a hundred times as long among a thousand is drawn so that the mean comes out right."""
    rng = random.Random(0)
    measured = np.array([rng.uniform(0.9, 1.1) for _ in range(999)] + [100.0])
    noise = noise_of(measured, np.ones(1000))
    drawn = np.array([(low + high) / 2 for low, high in pairwise(noise.quantiles)]).mean()
    assert noise.mean == pytest.approx(measured.mean(), rel=1e-3)
    assert drawn == pytest.approx(measured.mean(), rel=0.02)
    assert noise.quantiles[-2] < 1.2 < noise.quantiles[-1] < 25.0
