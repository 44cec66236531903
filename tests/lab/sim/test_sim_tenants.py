"""Tenants on one simulated engine: a flood delays no other, tokens are split by weights, and many share alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from harness import tiny_base

from manylora.core.config import SchedulerConfig
from manylora.lab.costs.model import FixedCost
from manylora.lab.measure import RequestRecord
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.workloads import RequestSpec, Workload

SEATS, ANSWER = 32, 20
STEP_S = 0.02
CAPACITY = SEATS / ANSWER / STEP_S
"""Requests per second, at most: every seat taken, a token of each in a step."""


def stream(tenant: str, rate: float, seconds: float, seed: int, weight: float = 1.0) -> list[RequestSpec]:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))
    return [
        RequestSpec(arrival_s=at, num_prompt_tokens=20, num_output_tokens=ANSWER, tenant=tenant, weight=weight)
        for at in times.tolist()
    ]


def run(requests: Iterable[RequestSpec], policy: str = "fair") -> list[tuple[RequestSpec, RequestRecord]]:
    ordered = tuple(sorted(requests, key=lambda one: one.arrival_s))
    config = SimulationConfig(
        base=tiny_base(max_model_len=128),
        cost=FixedCost(step_s=STEP_S, token_s=0.0),
        num_pages=800,
        scheduler=SchedulerConfig(
            policy=policy, max_num_seqs=SEATS, max_num_batched_tokens=400, max_waiting=10**6, predictor="oracle"
        ),
    )
    return list(zip(ordered, simulate(Workload(name="tenants", requests=ordered), config).records, strict=True))


def p99_s(pairs: Iterable[tuple[RequestSpec, RequestRecord]], without: str = "flood") -> float:
    return float(np.percentile([record.ttft_s for spec, record in pairs if spec.tenant != without], 99))


def test_a_flood_delays_no_tenant_that_keeps_to_its_share():
    light, flood = stream("light", CAPACITY / 4, 4.0, 1), stream("flood", 25 * CAPACITY, 4.0, 2)
    alone = p99_s(run(light))
    assert p99_s(run([*light, *flood])) <= 1.2 * alone
    assert p99_s(run([*light, *flood], "fifo")) > 20 * alone


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tokens_are_split_by_weights(weight):
    pairs = run([*stream("one", 2 * CAPACITY, 8.0, 3), *stream("other", 2 * CAPACITY, 8.0, 4, weight)])
    tokens = Counter[str]()
    for spec, record in pairs:
        tokens[spec.tenant] += ANSWER * (record.finished_at < 8.0)
    assert tokens["other"] / tokens["one"] == pytest.approx(weight, rel=0.05)


def test_one_of_many_tenants_at_a_hundred_times_its_share_delays_none_of_the_others():
    each = 0.8 * CAPACITY / 300
    others = [one for index in range(300) for one in stream(f"t{index}", each, 10.0, index)]
    alone, together = run(others), run([*others, *stream("flood", 100 * each, 10.0, 999)])
    assert p99_s(together) <= 1.2 * p99_s(alone)
    got = Counter(spec.tenant for spec, record in together if record.e2e_s < 2 * ANSWER * STEP_S)
    parts = np.array([got[tenant] / num for tenant, num in Counter(one.tenant for one in others).items()])
    assert parts.sum() ** 2 / (len(parts) * (parts**2).sum()) >= 0.95
