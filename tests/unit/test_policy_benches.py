"""The benchmarks of policies run, and what they report adds up."""

from __future__ import annotations

import policies
import pytest

from manylora.bench.core import Scale, measure_decision
from manylora.config import AdapterConfig, SchedulerConfig
from manylora.scheduling import POLICIES


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_decision_is_timed_with_everything_full(policy):
    cost = measure_decision(policy, "lru", Scale(4, 12, 10, 1e6), num_steps=40)
    assert 0 < cost.launch_us <= cost.turn_us
    assert cost.mean_running > 3
    assert cost.admitted_per_step > 0


def test_a_row_counts_what_was_simulated():
    workload = policies.make_workload(8.0, 10.0, lengths=None, scale=0.3, num_adapters=10, seed=1)
    scheduler = SchedulerConfig(policy="chameleon", predictor="noisy")
    row = policies.run(
        ("chameleon", "lru", "x"),
        workload,
        scheduler,
        AdapterConfig(host_bytes=1 << 50),
        warm_up_s=2.0,
        slo_s=5.0,
    )
    assert row.requests == sum(one.arrival_s >= 2.0 for one in workload.requests)
    assert 0 < row.ttft_p50 <= row.ttft_p99
    assert 0 < row.hit_rate <= 1
    records = policies.serve(workload, scheduler, AdapterConfig(host_bytes=1 << 50)).records
    # Every answer has the length it was drawn with, though requests came with a far higher cap.
    assert [one.num_output_tokens for one in records] == [one.num_output_tokens for one in workload.requests]
