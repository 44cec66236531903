"""The simulator is deterministic: the same trace gives the same event log, to the byte, in any process.

A changed digest is not a failure of the simulator but a change of behaviour: look at what changed, and if it is
meant, print the new digest with ``python tests/golden/test_simulator.py``.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.events import Event, RequestFinished
from manylora.core.types import AdapterKey, AdapterVersion, Request, SamplingParams
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.build import simulated_parts
from manylora.lab.sim.run.simulation import SimulationConfig

DIGEST = "be647a8cfb6fcd0e1896ca84f6f8c67d"
NUM_REQUESTS = 400


def simulate() -> tuple[list[Event], EngineCore]:
    """Run 400 requests over 40 adapters on a pool too small for them, at about capacity."""
    config = EngineConfig(
        model=ModelConfig(model="none"),
        memory=MemoryConfig(num_pages=400),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
        adapters=AdapterConfig(max_cpu_loras=30),
    )
    clock = VirtualClock()
    target = SimulationConfig(base=base_shape("llama-3-8b"), cost=FixedCost(), num_pages=400)
    parts = simulated_parts(target, "synthetic")
    events: list[Event] = []
    core = EngineCore(parts, config, sinks=[events.append])
    for index in range(40):
        core.adapters.register(f"a{index}", synthetic_version(index), 0.0)
    EngineLoop(core, clock, on_outputs=lambda outputs, now: None, arrivals=arrivals()).run()
    return events, core


def synthetic_version(index: int) -> AdapterVersion:
    num_pages = (5, 10, 20, 40, 80)[index % 5]
    return AdapterVersion(
        key=AdapterKey(f"{index:032x}"),
        source=f"a{index}",
        rank=num_pages,
        num_modules=1,
        target_modules=("q_proj",),
        num_pages=num_pages,
        weight_bytes=num_pages << 21,
        host_bytes=num_pages << 21,
        disk_bytes=num_pages << 21,
    )


def arrivals() -> list[tuple[float, Request]]:
    rng = random.Random(7)
    at, out = 0.0, []
    for index in range(NUM_REQUESTS):
        at += rng.expovariate(12.0)
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(10, 400)))
        if index % 5 == 0:
            prompt = tuple(range(200)) + prompt  # a prefix in common
        request = Request(
            request_id=f"r{index}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=rng.randint(1, 120)),
            model=f"a{min(int(rng.paretovariate(0.7)) - 1, 39)}" if rng.random() < 0.9 else "base",
        )
        out.append((at, request))
    return out


def digest(events: list[Event]) -> str:
    return hashlib.blake2b("\n".join(map(repr, events)).encode(), digest_size=16).hexdigest()


def test_everybody_is_served_under_pressure():
    events, core = simulate()
    core.check_integrity()
    finished = [event for event in events if isinstance(event, RequestFinished)]
    assert len(finished) == NUM_REQUESTS
    stats = core.stats()
    # The trace exercises what the digest is to guard.
    assert min(stats.num_evictions, stats.num_preemptions, stats.num_disk_loads, stats.num_prefix_evictions) > 0
    assert stats.num_cached_tokens > 0
    assert 0 < stats.num_adapter_hits < stats.num_adapter_requests


def test_the_event_log_is_the_one_on_record():
    assert digest(simulate()[0]) == DIGEST


@pytest.mark.slow
def test_another_process_writes_the_same_log():
    output = subprocess.run([sys.executable, str(Path(__file__))], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == digest(simulate()[0])


if __name__ == "__main__":
    print(digest(simulate()[0]))
