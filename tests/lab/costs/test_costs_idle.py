"""A request by itself takes the sum of its steps."""

import pytest

from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, SamplingParams
from manylora.lab.costs.idle import time_on_idle_engine
from manylora.lab.costs.roofline import RooflineCost

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
