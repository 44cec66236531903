"""A simulated service of several replicas gives the same event log, to the byte, in any process.

As for the single engine, a changed digest is a change of behaviour: look at what changed, and if it is meant, print the
new one with ``python tests/golden/test_replicas.py``.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.core.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.core.events import Event
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.simulation import Run, SimulationConfig, simulate
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

DIGEST = "08108d4b4aa24e44fcf4411a47a9f044"


def workload() -> Workload:
    """Return 500 requests over 40 adapters, some with a prefix in common."""
    rng, at, requests = random.Random(11), 0.0, []
    for index in range(500):
        at += rng.expovariate(30.0)
        requests.append(
            RequestSpec(
                arrival_s=at,
                num_prompt_tokens=rng.randint(5, 400),
                num_output_tokens=rng.randint(1, 120),
                adapter=f"a{min(int(rng.paretovariate(0.7)) - 1, 39)}" if rng.random() < 0.9 else None,
                prefix=(index % 3,) if rng.random() < 0.3 else (),
                prefix_block_tokens=64,
            )
        )
    adapters = tuple(AdapterSpec(name=f"a{index}", rank=(8, 16, 32, 64, 128)[index % 5]) for index in range(40))
    return Workload(name="golden", requests=tuple(requests), adapters=adapters)


def run() -> tuple[Run, list[Event]]:
    """Serve it on three replicas with pools too small for it."""
    events: list[Event] = []
    config = SimulationConfig(
        base=base_shape("llama-3-8b"),
        cost=FixedCost(),
        num_pages=300,
        num_replicas=3,
        router="affinity",
        scheduler=SchedulerConfig(
            policy="chameleon",
            policy_options={"refresh_s": 3.0},
            predictor="noisy",
            max_num_seqs=32,
            max_num_batched_tokens=512,
        ),
        memory=MemoryConfig(prefix_caching=True),
        adapters=AdapterConfig(max_cpu_loras=20),
        scheduler_time_s=0.0002,
    )
    return simulate(workload(), config, sinks=(events.append,)), events


def digest() -> str:
    done, events = run()
    lines = [*map(repr, events), *map(repr, done.records)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def test_the_run_exercises_what_the_digest_is_to_guard():
    done, _ = run()
    assert {record.replica for record in done.records} == {0, 1, 2}
    assert all(record.error is None for record in done.records)
    for name in ("num_preemptions", "num_evictions", "num_disk_loads", "num_prefix_evictions", "num_cached_tokens"):
        assert sum(getattr(stats, name) for stats in done.stats) > 0, name
    assert any(record.adapter_wait_s > 0 for record in done.records)


@pytest.mark.slow
def test_the_log_is_the_one_on_record_here_and_in_another_process():
    assert digest() == DIGEST
    output = subprocess.run([sys.executable, str(Path(__file__))], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == DIGEST


if __name__ == "__main__":
    print(digest())
