"""A request by itself: what a step-by-step sum says, without the steps; and the published facts it explains."""

import pytest
from unloaded import FITTING, constants, fits, loading_share, predictions, solve_scale

from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, SamplingParams
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.sim.idle_engine import time_on_idle_engine

COST = RooflineCost("llama-7b", "a40", lora_kernel="s-lora-mbgmm")


def step_s(start: int, num_tokens: int, rank: int) -> float:
    sequence = PlannedSequence(
        seq_id=0,
        tokens=(),
        num_prompt_tokens=0,
        start=start,
        num_tokens=num_tokens,
        pages=(),
        adapter=AdapterKey("a") if rank else None,
        rank=rank,
        sampling=SamplingParams(),
        is_sampled=True,
        seed=0,
    )
    return COST.step_time_s(StepPlan(step_id=0, sequences=(sequence,)))


@pytest.mark.parametrize("rank", [0, 64])
@pytest.mark.parametrize("num_output_tokens", [1, 2, 50])
def test_a_request_alone_is_the_sum_of_its_steps(rank: int, num_output_tokens: int) -> None:
    alone = time_on_idle_engine(COST, 200, num_output_tokens, rank=rank, load_s=0.01)
    assert alone.ttft_s == pytest.approx(0.01 + step_s(0, 200, rank))
    steps = sum(step_s(200 + done, 1, rank) for done in range(num_output_tokens - 1))
    assert alone.e2e_s == pytest.approx(alone.ttft_s + steps)


def test_constants_are_what_the_facts_they_were_set_by_imply() -> None:
    for row in constants():
        assert row.in_code == pytest.approx(row.implied, rel=0.03), row.name


def test_what_was_not_set_comes_out_near_what_was_published() -> None:
    """Those that are missed by more are named, so that nobody takes the table for better than it is."""
    missed = {row.fact for row in predictions() if abs(row.model / row.published - 1) > 0.2}
    assert missed == {"base step of Llama-70B, batch 128 (VL), ms"}


def test_models_fit_where_they_were_run() -> None:
    for model, hardware, devices, expected in FITTING:
        assert fits(model, hardware, devices) == expected, (model, hardware, devices)


def test_loading_weighs_more_with_more_devices_and_with_rank() -> None:
    shares = [[loading_share(devices, rank) for rank in (8, 32, 128)] for devices in (2, 4, 8)]
    for line in [*shares, *zip(*shares, strict=True)]:
        assert list(line) == sorted(line)


def test_the_length_scale_makes_the_mean_request_take_a_second() -> None:
    lengths = [(1000, 200), (2000, 100), (500, 400)]
    scale = solve_scale(lengths, mean_s=1.0)
    assert 0.05 < scale < 0.5
    assert solve_scale(lengths, mean_s=2.0) > scale
