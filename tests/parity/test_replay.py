"""The simulator decides what the server decides: given the times of a live run's work, every event is the same."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from replay import Diverged, ReplayExecutor
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.core.clock import Clock, VirtualClock, WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LoggedExecutor, LogLine, StepRecord
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.events import (
    AdapterEvicted,
    Event,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
)
from manylora.core.plan import PlannedSequence
from manylora.core.ports import EngineParts, Executor
from manylora.core.types import AdapterVersion, Request, SampledToken, SamplingParams, Tier
from manylora.execution.build import build_parts
from manylora.lab.bench.sweep import write_synthetic_adapter
from manylora.lab.sim.run.contents import synthetic_token

VOCAB_SIZE = 256
NUM_ADAPTERS = 12
NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Everything is short: pages, seats, room in host memory."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    )
    model.save_pretrained(folder)
    return EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu"),
        memory=MemoryConfig(num_pages=70),
        scheduler=SchedulerConfig(
            max_num_seqs=12,
            max_num_batched_tokens=64,
            policy_options={"queue_criterion": "wcss", "refresh_s": 0.2},
        ),
        adapters=AdapterConfig(max_cpu_loras=6),
    )


def run(
    config: EngineConfig,
    parts: EngineParts,
    executor: Executor,
    clock: Clock,
    versions: list[AdapterVersion],
    arrivals: list[tuple[float, Request]],
) -> list[Event]:
    """Serve the arrivals on the engine that is asked for; return every event."""
    events: list[Event] = []
    core = EngineCore(replace(parts, executor=executor), config, sinks=[events.append])
    for index, version in enumerate(versions):
        core.adapters.register(f"a{index}", version, clock.now() if isinstance(clock, VirtualClock) else arrivals[0][0])
    EngineLoop(core, clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
    core.check_integrity()
    return events


def make_arrivals(start_s: float) -> list[tuple[float, Request]]:
    rng = random.Random(3)
    arrivals, at = [], start_s
    for index in range(NUM_REQUESTS):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(5, 120)))
        request = Request(
            request_id=f"r{index}",
            prompt=tuple(range(48)) + prompt if index % 4 == 0 else prompt,  # a prefix in common
            sampling=SamplingParams(temperature=0.0, max_tokens=rng.randint(2, 50), ignore_eos=True),
            model=f"a{min(int(rng.paretovariate(0.6)) - 1, NUM_ADAPTERS - 1)}" if rng.random() < 0.9 else "base",
        )
        arrivals.append((at, request))
        at += rng.expovariate(6000.0)  # more than any machine can serve, so that all have a queue
    return arrivals


def choose(part: PlannedSequence) -> SampledToken:
    return synthetic_token(part, VOCAB_SIZE)


@pytest.mark.parametrize("policy", ["fifo", "chameleon"])
def test_a_replay_of_a_live_run_is_the_same_to_the_last_event(
    engine: EngineConfig, tmp_path: Path, policy: str
) -> None:
    config = replace(engine, scheduler=replace(engine.scheduler, policy=policy))
    clock = WallClock()
    parts = build_parts(config, clock)
    rng = np.random.default_rng(0)
    folders = [
        write_synthetic_adapter(tmp_path / f"a{index}", parts.base, (4, 8, 16, 32)[index % 4], rng)
        for index in range(NUM_ADAPTERS)
    ]
    versions = [parts.reader.read(folder.name, str(folder)) for folder in folders]
    lines: list[LogLine] = []
    start_s = clock.now()
    live = run(config, parts, LoggedExecutor(parts.executor, lines.append), clock, versions, make_arrivals(start_s))
    parts.close()

    # Requests come when the live loop took them in, which is a little after they were due.
    requests = {request.request_id: request for _, request in make_arrivals(0.0)}
    arrivals = [(one.at, requests[one.request_id]) for one in live if isinstance(one, RequestArrived)]
    replayed = run(config, parts, ReplayExecutor(lines, choose), VirtualClock(start_s), versions, arrivals)

    assert parts.reads_host and any(isinstance(one, StepRecord) and one.features.num_host_adapted for one in lines)
    counts = Counter(type(event) for event in live)
    assert counts[RequestFinished] == NUM_REQUESTS
    assert counts[RequestAdmitted] == NUM_REQUESTS
    if policy == "fifo":  # Chameleon takes in no more than it foresees room for
        assert counts[RequestPreempted] > 0
    assert sum(isinstance(event, AdapterEvicted) and event.tier is Tier.DEVICE for event in live) > NUM_ADAPTERS
    assert sum(isinstance(event, AdapterEvicted) and event.tier is Tier.HOST for event in live) > 0
    difference = next((pair for pair in zip(replayed, live, strict=False) if pair[0] != pair[1]), None)
    assert difference is None
    assert len(replayed) == len(live)

    # And it would have been noticed.
    fewer_seats = replace(config, scheduler=replace(config.scheduler, max_num_seqs=6))
    with pytest.raises(Diverged):
        run(fewer_seats, parts, ReplayExecutor(lines, choose), VirtualClock(start_s), versions, arrivals)
