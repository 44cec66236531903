"""Overload in virtual time: goodput holds at ten times the capacity, for known and unknown lengths, long and short."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from harness import tiny_base

from manylora.core.config import SchedulerConfig
from manylora.lab.costs.model import FixedCost
from manylora.lab.measure import RequestRecord, Slo
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

LOADS = (1.0, 2.0, 10.0)
LEAST_SHARE = 0.95
MOST_LATE = 0.02
SLO = Slo(ttft_s=2.0, tpot_s=0.150)
MAX_WAIT_S = 1.0
NUM_SEATS = 64
ADAPTERS = tuple(f"a{index}" for index in range(6))
COST = FixedCost(step_s=0.03, token_s=0.0003, copy_bytes_per_s=1e9, disk_bytes_per_s=1e9)
BASE = tiny_base(max_model_len=4096)


@dataclass(frozen=True)
class Case:
    """A kind of requests.

    Args:
        prompt: Shortest and longest prompt; lengths between are as likely.
        answer: Shortest and longest answer.
        are_known: Whether a request's cap is the length of its answer; otherwise the predictor learns it.
        ramp_s: Time before that which counts.
        span_s: Time that counts.
    """

    prompt: tuple[int, int]
    answer: tuple[int, int]
    are_known: bool
    ramp_s: float = 10.0
    span_s: float = 20.0


CASES = {
    "known lengths": Case((3, 8), (50, 150), True),
    "unknown lengths": Case((3, 8), (10, 200), False, ramp_s=25.0),
    "long prompts": Case((100, 300), (50, 150), True),
    "short answers": Case((3, 8), (1, 12), True, ramp_s=3.0, span_s=5.0),
}


def serve(case: Case, rate: float, seed: int) -> tuple[float, list[RequestRecord]]:
    """Return the goodput in tokens per second, and the requests that arrived in the time that counts.

    Arrivals are a Poisson process given their number, so that a load is no larger or smaller by chance.
    """
    rng = random.Random(seed)
    ends_at = case.ramp_s + case.span_s
    arrivals = sorted(
        rng.uniform(begin, begin + span)
        for begin, span in ((0.0, case.ramp_s), (case.ramp_s, case.span_s))
        for _ in range(round(rate * span))
    )
    prompts, answers = _even(rng, case.prompt, len(arrivals)), _even(rng, case.answer, len(arrivals))
    requests = tuple(
        RequestSpec(
            arrival_s=at,
            num_prompt_tokens=prompt,
            num_output_tokens=answer,
            adapter=rng.choice((None, *ADAPTERS)),
        )
        for at, prompt, answer in zip(arrivals, prompts, answers, strict=True)
    )
    config = SimulationConfig(
        base=BASE,
        cost=COST,
        num_pages=4000,
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS, max_wait_s=MAX_WAIT_S, max_num_batched_tokens=512),
        exact_caps=case.are_known,
        max_tokens=None if case.are_known else 1024,
    )
    adapters = tuple(AdapterSpec(name=name, rank=8) for name in ADAPTERS)
    run = simulate(Workload(name="overload", requests=requests, adapters=adapters), config)
    tokens = 0.0
    for record in run.records:
        if SLO.is_met(record):
            assert record.ttft_s is not None
            assert record.e2e_s is not None
            first_at, ended_at = record.arrived_at + record.ttft_s, record.arrived_at + record.e2e_s
            within_s = max(0.0, min(ends_at, ended_at) - max(case.ramp_s, first_at))
            is_at_once = ended_at == first_at and case.ramp_s <= first_at < ends_at
            tokens += record.num_output_tokens * (
                within_s / (ended_at - first_at) if ended_at > first_at else is_at_once
            )
    return tokens / case.span_s, [record for record in run.records if record.arrived_at >= case.ramp_s]


def _even(rng: random.Random, between: tuple[int, int], num: int) -> list[int]:
    """Return lengths that are spread evenly, in a random order: a load is no larger by its lengths either."""
    low, high = between
    return rng.sample([low + index * (high - low + 1) // num for index in range(num)], num)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_goodput_holds_at_ten_times_the_capacity(name: str) -> None:
    case = CASES[name]
    mean = sum(case.answer) / 2
    guess = NUM_SEATS / (COST.step_s + NUM_SEATS * COST.token_s) / mean
    capacity = serve(case, 1.25 * guess, seed=0)[0] / mean
    found = {load: serve(case, load * capacity, seed=2) for load in LOADS}
    best = max(tokens for tokens, _ in found.values())
    for load, (tokens, records) in found.items():
        assert tokens >= LEAST_SHARE * best, (load, tokens, best)
        late = sum(record.error is None and not SLO.is_met(record) for record in records)
        assert late <= MOST_LATE * sum(record.error is None for record in records), (load, late)
