"""The benchmarks of policies run, and what they report adds up."""

from __future__ import annotations

import decision
import policies
import pytest

from manylora.config import AdapterConfig, SchedulerConfig
from manylora.scheduling import POLICIES


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_decision_is_timed_with_everything_full(policy):
    cost = decision.measure(policy, "lru", decision.Scale(4, 12, 10, 1e6), num_steps=40)
    assert 0 < cost.launch_us <= cost.turn_us
    assert cost.mean_running > 3
    assert cost.admitted_per_step > 0


def test_a_row_counts_what_was_simulated():
    versions = policies.adapter_versions(10)
    jobs = policies.make_jobs(8.0, 10.0, lengths=None, scale=0.3, num_adapters=10, seed=1)
    scheduler = SchedulerConfig(policy="chameleon", predictor="noisy")
    row = policies.run(
        ("chameleon", "lru", "x"),
        jobs,
        versions,
        scheduler,
        AdapterConfig(host_bytes=1 << 50),
        warm_up_s=2.0,
        slo_s=5.0,
    )
    assert row.requests == sum(job.at >= 2.0 for job in jobs)
    assert 0 < row.ttft_p50 <= row.ttft_p99
    assert 0 < row.hit_rate <= 1
    _, record = policies.simulate(jobs, versions, scheduler, AdapterConfig(host_bytes=1 << 50))
    # Every answer has the length it was drawn with, though requests came with a far higher cap.
    assert [len(record.tokens[str(index)]) for index in range(len(jobs))] == [job.output for job in jobs]
