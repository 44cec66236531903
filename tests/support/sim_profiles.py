"""A cost profile made up by hand, and the log of a sweep over an engine that costs what it says."""

from __future__ import annotations

import random

from harness import version

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LogHeader, LogLine, StepRecord
from manylora.lab.bench.sweep import run_sweep
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.profile import CostProfile, LoadCost, RowTimes
from manylora.lab.sim.build import simulated_parts
from manylora.lab.sim.run.simulation import SimulationConfig

TRUTH = {
    "step": 3e-3,
    "context_token": 2e-7,
    "prompt_pair": 5e-9,
    "adapter": 1e-4,
    "rank": 2e-5,
    "decode_row_rank": 1e-6,
    "prompt_row_rank": 4e-7,
}
ROWS = RowTimes(knots=(0, 16, 64), row_s=(1e-5, 4e-5, 8e-5))


def make_profile(**fields: object) -> CostProfile:
    known: dict[str, object] = {
        "base": base_shape("llama-3-8b"),
        "num_pages": 600,
        "machine": "a machine",
        "lora_kernel": "grouped",
        "command": "by hand",
        "terms": TRUTH,
        "rows": ROWS,
        "turn_s": 2e-4,
        "turn_sequence_s": 1e-6,
        "loads": {
            "host": LoadCost(fixed_s=2e-3, byte_s=1e-9, num_measured=9),
            "device": LoadCost(fixed_s=1e-3, byte_s=1e-10, num_measured=9),
        },
        "noise": {},
        "interference": {"host": 0.0, "device": 0.0},
        "errors": (),
        "num_steps": 100,
    }
    return CostProfile(**{**known, **fields})  # type: ignore[arg-type]


def sweep(profile: CostProfile, *, seconds: float = 4.0, rng: random.Random | None = None) -> list[LogLine]:
    """Log a sweep over an engine that costs what the profile says, in virtual time."""
    config = EngineConfig(
        model=ModelConfig(model="none"),
        memory=MemoryConfig(num_pages=profile.num_pages, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
        adapters=AdapterConfig(eviction="none", max_cpu_loras=6),
    )
    clock = VirtualClock()
    cost = FittedCost(profile, rng)
    target = SimulationConfig(
        base=profile.base,
        cost=cost,
        num_pages=profile.num_pages,
        interference=cost.interference,
        speed=cost.speed,
    )
    parts = simulated_parts(target, "synthetic")
    adapters = [version(f"key-{index}", num_pages=4 + index % 4 * 8, rank=8 << index % 4) for index in range(12)]
    header = LogHeader(base=parts.base, num_pages=parts.num_pages, machine="a machine", reads_host=profile.reads_host)
    lines: list[LogLine] = [header]
    num_steps = run_sweep(
        parts, config, adapters, clock=clock, rng=random.Random(0), seconds=seconds, write=lines.append
    )
    assert num_steps == sum(isinstance(line, StepRecord) for line in lines)
    return lines
