"""Engines with slots for adapters beside KV of its own, as vLLM has them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from harness import tiny_base

from manylora.core.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.events import AdapterEvicted, AdapterLoaded, AdapterLoadStarted, Event, TokensEmitted
from manylora.core.types import Tier
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.simulation import Run, SimulationConfig, simulate
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

BASE = tiny_base(max_model_len=512)
CONFIG = SimulationConfig(
    base=BASE,
    cost=FixedCost(step_s=0.01, token_s=0.0, copy_bytes_per_s=1e6, disk_bytes_per_s=5e5),
    num_pages=2,  # less than one request needs: they are not used
    num_slots=2,
    adapters=AdapterConfig(max_cpu_loras=4, background_reads=False, look_ahead=0),
)
BLOCKING = SchedulerConfig(step_composition="s-lora-chunked")
ADAPTERS = tuple(AdapterSpec(name=f"a{index}", rank=(4, 16)[index % 2]) for index in range(6))


def serve(config: SimulationConfig, requests: list[RequestSpec]) -> tuple[Run, list[Event]]:
    events: list[Event] = []
    run = simulate(Workload(name="slots", requests=tuple(requests), adapters=ADAPTERS), config, sinks=(events.append,))
    return run, events


def draw(num_requests: int) -> list[RequestSpec]:
    rng, at, requests = random.Random(0), 0.0, []
    for _ in range(num_requests):
        at += rng.expovariate(20.0)
        adapter = f"a{rng.randrange(6)}" if rng.random() < 0.9 else None
        sizes = rng.randint(1, 300), rng.randint(1, 100)
        requests.append(
            RequestSpec(arrival_s=at, num_prompt_tokens=sizes[0], num_output_tokens=sizes[1], adapter=adapter)
        )
    return requests


@pytest.mark.parametrize("scheduler", [SchedulerConfig(policy="adapter-aware"), BLOCKING])
def test_slots_bound_adapters_and_kv_is_never_short(scheduler: SchedulerConfig) -> None:
    requests = draw(80)
    run, events = serve(replace(CONFIG, scheduler=scheduler), requests)
    assert [one.num_output_tokens for one in run.records] == [one.num_output_tokens for one in requests]
    held: set[str] = set()
    for event in events:
        if isinstance(event, AdapterLoadStarted) and event.tier is Tier.DEVICE:
            held.add(event.adapter)
            assert len(held) <= 2
        elif isinstance(event, AdapterEvicted) and event.tier is Tier.DEVICE:
            held.remove(event.adapter)
    assert run.stats[0].num_preemptions == 0 and run.stats[0].num_evictions > 5
    assert run.stats[0].num_pages == 2


def test_a_copy_begins_when_its_whole_adapter_is_read() -> None:
    run, events = serve(CONFIG, [RequestSpec(arrival_s=0.0, num_prompt_tokens=8, num_output_tokens=1, adapter="a1")])
    loads = [event for event in events if isinstance(event, AdapterLoaded)]
    assert [load.tier for load in loads] == [Tier.HOST, Tier.DEVICE]
    num_bytes = next(event.num_bytes for event in events if isinstance(event, AdapterLoadStarted))
    assert loads[0].at == pytest.approx(num_bytes / 5e5)
    assert loads[1].at == pytest.approx(num_bytes / 5e5 + num_bytes / 1e6)
    assert run.records[0].ttft_s == pytest.approx(loads[1].at + 0.01, abs=1e-3)


def test_steps_wait_for_loads_only_where_they_are_to() -> None:
    def longest_gap(scheduler: SchedulerConfig) -> float:
        requests = [
            RequestSpec(arrival_s=0.0, num_prompt_tokens=8, num_output_tokens=200),
            RequestSpec(arrival_s=0.1, num_prompt_tokens=8, num_output_tokens=1, adapter="a0"),
        ]
        _, events = serve(replace(CONFIG, scheduler=scheduler), requests)
        times = [event.at for event in events if isinstance(event, TokensEmitted) and "0" in event.request_ids]
        return max(after - before for before, after in itertools.pairwise(times))

    assert longest_gap(SchedulerConfig()) < 0.02 < longest_gap(BLOCKING)


def test_host_copies_by_price_leave_fewer_reads_than_by_last_use() -> None:
    """Drawn at random, popular adapters stay in slots without a copy, and host memory has the next ones."""
    rng, weights = random.Random(1), [1 / place for place in range(1, 25)]
    requests = [
        RequestSpec(arrival_s=10.0 * number, num_prompt_tokens=8, num_output_tokens=1, adapter=f"a{adapter}")
        for number, adapter in enumerate(rng.choices(range(24), weights, k=1200))
    ]
    adapters = tuple(AdapterSpec(name=f"a{index}", rank=8) for index in range(24))
    num_reads = {}
    for order in ("lru", "price"):
        of_host = AdapterConfig(max_cpu_loras=6, background_reads=False, look_ahead=0, host_eviction=order)
        events: list[Event] = []
        workload = Workload(name="slots", requests=tuple(requests), adapters=adapters)
        run = simulate(workload, replace(CONFIG, num_slots=4, adapters=of_host), sinks=(events.append,))
        num_reads[order], num_in_host = run.stats[0].num_disk_loads, 0
        for event in events:
            if isinstance(event, AdapterLoaded | AdapterEvicted) and event.tier is Tier.HOST:
                num_in_host += 1 if isinstance(event, AdapterLoaded) else -1
                assert num_in_host <= 7, "one more while it arrives"
    assert num_reads["price"] < 0.9 * num_reads["lru"]


@pytest.mark.parametrize(
    "changes", [{"num_slots": 0}, {"all_resident": True}, {"memory": MemoryConfig(prefix_caching=True)}]
)
def test_what_slots_exclude_is_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="num_slots"):
        replace(CONFIG, **changes)  # type: ignore[arg-type]
