"""The twin of vLLM against vLLM's rules written down a second time, and counts of loads against the fewest."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from vllm_log import Step, log_lines
from vllm_twin import (
    BASE,
    NUM_HOST,
    NUM_SEATS,
    NUM_SLOTS,
    RANK,
    count_lru,
    draw_requests,
    fewest,
    fewest_known,
    make_adapters,
    plugin_rules,
    serve_simulated,
    vllm_rules,
)

from manylora.core.costs.features import step_features
from manylora.core.costs.step_log import LoadRecord, StepRecord
from manylora.core.plan import AdapterLoad, StepPlan
from manylora.core.types import AdapterKey, Tier
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.workloads import RequestSpec

pytest.importorskip("scipy")

NUM_TOKENS = 512
READ_S = 0.07


class Cost:
    """Steps by their tokens, reads of a time, and copies of none."""

    def step_time_s(self, plan: StepPlan) -> float:
        return step_s(sum(part.num_tokens for part in plan.sequences))

    def load_time_s(self, load: AdapterLoad) -> float:
        return READ_S if load.tier is Tier.HOST else 0.0


def step_s(num_tokens: int) -> float:
    return 0.01 + 0.0003 * num_tokens


@dataclass(eq=False)
class Seen:
    """A request of the loop below."""

    asks: RequestSpec
    num_computed: int = 0
    times: list[float] = field(default_factory=list)


def by_vllm(requests: Sequence[RequestSpec]) -> tuple[list[list[float]], list[tuple[str, str]]]:
    """Return times of tokens by request, and the loads in order, by the loop of vLLM's scheduler and its caches.

    Running requests first, then those that wait, in order, while there are seats and tokens; one whose adapter has no
    slot in the step is passed over. The step waits for its loads, in the order of its requests; in vLLM in that of a
    set, which decides when the load of one evicts another of the same step.
    """
    seen = [Seen(one) for one in requests]
    coming, waiting, running = list(seen), list[Seen](), list[Seen]()
    tiers: dict[str, OrderedDict[str, None]] = {"read": OrderedDict(), "copy": OrderedDict()}
    loads: list[tuple[str, str]] = []
    now = 0.0
    while coming or waiting or running:
        now = max(now, coming[0].asks.arrival_s) if not (waiting or running) else now
        while coming and coming[0].asks.arrival_s <= now:
            waiting.append(coming.pop(0))
        left, step = NUM_TOKENS, list[tuple[Seen, int]]()

        def take(one: Seen) -> int:
            num = min(one.asks.num_prompt_tokens + len(one.times) - one.num_computed, left)  # noqa: B023
            step.append((one, num))  # noqa: B023
            return num

        for one in running:
            left -= take(one)
        used = {str(one.asks.adapter) for one, _ in step}
        for one in list(waiting):
            if not left or len(running) == NUM_SEATS:
                break
            if len(used) < NUM_SLOTS or one.asks.adapter in used:
                waiting.remove(one)
                running.append(one)
                used.add(str(one.asks.adapter))
                left -= take(one)
        for one, _ in step:
            for (kind, tier), room in zip(tiers.items(), (NUM_HOST, NUM_SLOTS), strict=True):
                name = str(one.asks.adapter)
                if name not in tier:
                    loads.append((kind, name))
                    now += READ_S if kind == "read" else 0.0
                    if len(tier) == room:
                        tier.popitem(last=False)
                tier[name] = None
                tier.move_to_end(name)
        now += step_s(sum(num for _, num in step))
        for one, num in step:
            one.num_computed += num
            if one.num_computed == one.asks.num_prompt_tokens + len(one.times):
                one.times.append(now)
                if len(one.times) == one.asks.num_output_tokens:
                    running.remove(one)
    return [one.times for one in seen], loads


@pytest.mark.parametrize("rate", [0.5, 3.0, 6.0, 20.0])
def test_the_twin_does_what_vllm_does(rate: float) -> None:
    rng = random.Random(rate)
    drawn = draw_requests(seconds=200 / rate, rate=rate, seed=1, num_asked=24)
    requests = [
        RequestSpec(
            arrival_s=one.arrival_s,
            num_prompt_tokens=rng.randint(2, 900),
            num_output_tokens=one.num_output_tokens,
            adapter=one.adapter,
        )
        for one in drawn
    ]
    times, loads = by_vllm(requests)
    served = serve_simulated(requests, vllm_rules(num_tokens=NUM_TOKENS), BASE, Cost())
    assert [(kind, name) for kind, name, *_ in served.loads if kind == "read"] == [
        one for one in loads if one[0] == "read"
    ]
    assert sum(kind == "copy" for kind, *_ in served.loads) == sum(kind == "copy" for kind, _ in loads)
    for number, expected in enumerate(times):
        assert served.times[str(number)] == pytest.approx(expected, abs=1e-6)


def test_a_step_is_logged_without_the_loads_that_it_waits_for() -> None:
    features = step_features(synthetic_plan([SyntheticSequence(0, 8, AdapterKey("a1"), RANK)]))
    steps = [Step(1.0, 2.0, 0.9, 0.5, features), Step(2.0, 2.5, 0.4, 0.4, features)]
    loads = [("read", "a1", 10, 1.1, 1.4), ("copy", "a1", 0, 1.5, 1.6)]
    versions = adapter_versions(make_adapters(), BASE)
    lines = log_lines(BASE, versions, steps, loads, waits=True)
    logged = [line for line in lines if isinstance(line, StepRecord)]
    assert [(one.launched_at, one.ended_at) for one in logged] == [(pytest.approx(1.4), 2.0), (2.0, 2.5)]
    assert [one.device_s for one in logged] == pytest.approx([0.5, 0.4])
    kept = [(one.tier, one.launched_at, one.ended_at) for one in lines if isinstance(one, LoadRecord)]
    assert kept == [(Tier.HOST, 1.1, 1.4), (Tier.DEVICE, 1.5, 1.6)]
    beside = [line for line in log_lines(BASE, versions, steps, loads, waits=False) if isinstance(line, StepRecord)]
    assert [one.took_s for one in beside] == [1.0, 0.5], "loads beside steps are left where they were"


def belady(asked: list[str], room: int) -> int:
    kept: set[str] = set()
    num_loads = 0
    for number, adapter in enumerate(asked):
        if adapter not in kept:
            num_loads += 1
            if len(kept) == room:
                later = asked[number + 1 :]
                kept.remove(max(kept, key=lambda one: later.index(one) if one in later else len(asked)))
            kept.add(adapter)
    return num_loads


@pytest.mark.parametrize("room", [1, 2, 4])
def test_the_fewest_loads_of_equal_adapters_are_those_of_belady(room: int) -> None:
    rng = random.Random(room)
    for _ in range(20):
        asked = [f"a{int(8 * rng.random() ** 2)}" for _ in range(40)]
        assert fewest(asked, dict.fromkeys(asked, 1.0), room) == pytest.approx(belady(asked, room))


def test_dear_adapters_are_kept() -> None:
    asked = ["dear", "a", "b", "a", "dear", "a"]
    assert fewest(asked, {"dear": 10.0, "a": 1.0, "b": 1.0}, 2) == 10 + 1 + 1 + 1
    assert fewest(asked, {"dear": 1.0, "a": 1.0, "b": 1.0}, 2) == 4


def test_no_rule_needs_fewer_than_the_fewest() -> None:
    asked = [str(request.adapter) for request in draw_requests(seconds=40.0, rate=10.0, seed=3)]
    reads, copies = count_lru(asked)
    ones = dict.fromkeys(asked, 1.0)
    assert len(reads) >= fewest(asked, ones, NUM_HOST) and len(copies) >= fewest(asked, ones, NUM_SLOTS)
    assert fewest_known(asked, ones, NUM_SLOTS) >= fewest(asked, ones, NUM_SLOTS)
    assert reads <= copies, "an adapter that is read is copied"


def test_one_by_one_the_twin_needs_the_loads_that_are_counted() -> None:
    asked = [str(request.adapter) for request in draw_requests(seconds=40.0, rate=10.0, seed=3)]
    requests = [
        RequestSpec(arrival_s=10.0 * number, num_prompt_tokens=8, num_output_tokens=2, adapter=name)
        for number, name in enumerate(asked)
    ]
    kinds = [kind for kind, *_ in serve_simulated(requests, vllm_rules(), BASE, Cost()).loads]
    assert (kinds.count("read"), kinds.count("copy")) == tuple(map(len, count_lru(asked)))


def test_the_plug_in_has_orders_and_loads_of_its_own() -> None:
    scheduler, adapters = plugin_rules({})
    assert (scheduler.policy, scheduler.step_composition) == ("adapter-aware", "mixed")
    assert (adapters.eviction, adapters.look_ahead) == ("price", 10)
    scheduler, adapters = plugin_rules({"policy": "fifo", "eviction": "lru", "look_ahead": 0, "blocking_loads": True})
    assert (scheduler.policy, scheduler.step_composition, scheduler.max_loras) == ("fifo", "s-lora-chunked", None)
    assert (adapters.eviction, adapters.host_eviction, adapters.by_last_run) == ("lru", "lru", False)
