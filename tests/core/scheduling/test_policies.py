"""Guarantees of every policy under any arrivals, and of Chameleon for its queues.

The engine runs on the simulated executor and the virtual clock here: time passes as work does, so that "waits too
long" means something.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from harness import policy_context, sequence, small_base, version
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.events import Event, RequestAdmitted, RequestArrived, RequestFinished, RequestPreempted
from manylora.core.ports import CoreParts
from manylora.core.scheduling import (
    POLICIES,
    STEP_COMPOSITIONS,
    KeyedPolicy,
    Outcome,
    Policy,
    PolicyContext,
    make_policy,
)
from manylora.core.scheduling.policies.chameleon import queue_plan
from manylora.core.scheduling.policies.chameleon.policy import ChameleonPolicy
from manylora.core.scheduling.policies.fifo import MAX_BYPASS
from manylora.core.types import Request, SamplingParams
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor

NUM_ADAPTERS = 8
SLACK_S = 0.1
"""A few steps: what two means may differ by when no request waits."""
LEAST_WORK = f"{Path(__file__).parents[3] / 'examples' / 'own_policy.py'}:least_work"
# A plug-in, module:Name or file.py:Name, held to the same guarantees: docs/own-policy.md, "More than one number".
NAMES_OF_POLICIES = [*sorted(POLICIES), LEAST_WORK, *os.environ.get("OWN_POLICY", "").split()]
LONGEST_FIRST = f"{__name__}:longest_first"


@pytest.fixture(autouse=True)
def plan_queues_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_plan, "FIRST_PLAN_AFTER", 6)


def run(
    policy: str,
    asks: list[tuple[float, int, int, int]],
    *,
    num_pages: int,
    seats: int,
    max_loras: int | None,
    discipline: dict[str, object] | None = None,
) -> list[Event]:
    """Run requests of (gap, prompt, answer, adapter) to the end; the loop raises if they get stuck."""
    events: list[Event] = []
    executor = SimulatedExecutor(FixedCost(copy_bytes_per_s=1e5), vocab_size=1000)
    core = EngineCore(
        CoreParts(base=small_base(max_model_len=64), num_pages=num_pages, executor=executor),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=SchedulerConfig(
                policy=policy,
                max_num_seqs=seats,
                max_num_batched_tokens=16,
                max_loras=max_loras,
                max_waiting=10_000,
                predictor="noisy",
                predictor_options={"accuracy": 0.6},
                policy_options={"refresh_s": 1.0},
                **(discipline or {}),  # type: ignore[arg-type]
            ),
            memory=MemoryConfig(block_size=4, prefix_caching=False),
            adapters=AdapterConfig(),
        ),
        served_name="base",
        sinks=[events.append],
    )
    for index in range(NUM_ADAPTERS):
        core.adapters.register(f"a{index}", version(f"k{index}", num_pages=1 + index), 0.0)
    at, arrivals = 0.0, []
    for index, (gap, num_prompt, max_tokens, adapter) in enumerate(asks):
        at += gap
        arrivals.append(
            (
                at,
                Request(
                    request_id=str(index),
                    prompt=(1,) * num_prompt,
                    sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                    model=f"a{adapter}" if adapter >= 0 else "",
                ),
            )
        )
    EngineLoop(core, VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
    core.check_integrity()
    return events


ASKS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        st.integers(1, 24),
        st.integers(1, 24),
        st.integers(-1, NUM_ADAPTERS - 1),
    ),
    min_size=1,
    max_size=60,
)


S_LORA = {
    "step_composition": "s-lora",
    "reserve_output": "whole",
}
DISCIPLINES = st.fixed_dictionaries(
    {
        "step_composition": st.sampled_from(sorted(STEP_COMPOSITIONS)),
        "reserve_output": st.sampled_from(["none", "whole"]),
        "step_target_s": st.sampled_from([None, 0.0201, 0.022]),
    }
)


@pytest.mark.slow
@given(
    policy=st.sampled_from(NAMES_OF_POLICIES),
    asks=ASKS,
    num_pages=st.integers(22, 40),
    seats=st.integers(1, 6),
    max_loras=st.none() | st.integers(1, 3),
    discipline=DISCIPLINES,
)
@settings(max_examples=180)
def test_everybody_is_served_whatever_arrives(policy, asks, num_pages, seats, max_loras, discipline):
    events = run(policy, asks, num_pages=num_pages, seats=seats, max_loras=max_loras, discipline=discipline)
    finished = {event.request_id for event in events if isinstance(event, RequestFinished)}
    assert finished == {str(index) for index in range(len(asks))}
    if discipline["reserve_output"] == "whole":
        assert not any(isinstance(event, RequestPreempted) for event in events)


@pytest.mark.parametrize("discipline", [{}, S_LORA], ids=["ours", "s-lora"])
@pytest.mark.parametrize("policy", NAMES_OF_POLICIES, ids=lambda name: name.rpartition(":")[2])
@pytest.mark.parametrize("victim", ["cold", "large", "long"])
def test_nobody_waits_for_ever_behind_a_stream_that_is_favoured(policy, victim, discipline):
    """One request that the policy likes least, and a stream without end of those it likes best, at full load."""
    favoured = (0.01, 4, 4, 0)
    one = {"cold": (0.0, 4, 4, 7), "large": (0.0, 24, 24, 7), "long": (0.0, 4, 24, 0)}[victim]
    # Under a key of one's own those before it may be passed as often as it may itself: let them be few.
    num_before, num_after = (40, 400) if policy in POLICIES else (8, 1200)
    asks = [favoured] * num_before + [one] + [favoured] * num_after
    events = run(policy, asks, num_pages=26, seats=3, max_loras=1, discipline=discipline)
    arrived = {event.request_id: event.at for event in events if isinstance(event, RequestArrived)}
    admitted = {event.request_id: event.at for event in events if isinstance(event, RequestAdmitted)}
    last, its_id = max(arrived.values()), str(num_before)
    assert admitted[its_id] < last, "served only when the stream ended"
    # Those that came after it and went before it. Shortest first allows what ageing makes up for as well: 20 tokens
    # at 50 a second, in which 40 arrive. Some pass while its adapter is on its way.
    num_passed = sum(admitted[str(index)] < admitted[its_id] for index in range(num_before + 1, len(asks)))
    # Static queues give a queue with more than its share of the load no more than its share of the seats. Under boost
    # it is passed before it is the oldest as well.
    more = dict.fromkeys(POLICIES, 0) | {"boost": MAX_BYPASS, "sjf": 40, "static-queues": MAX_BYPASS}
    bound = MAX_BYPASS + 20 + more.get(policy, num_before * MAX_BYPASS)
    assert num_passed <= bound


def longest_first(context: PolicyContext) -> Policy:
    """An order that would starve the short, were it left to itself."""
    return KeyedPolicy(lambda sequence, now: -sequence.num_prompt_tokens)


@given(asks=ASKS, num_pages=st.integers(22, 40), seats=st.integers(1, 6), max_loras=st.none() | st.integers(1, 3))
@settings(max_examples=40)
def test_everybody_is_served_under_a_key_that_nobody_thought_of(asks, num_pages, seats, max_loras):
    events = run(LONGEST_FIRST, asks, num_pages=num_pages, seats=seats, max_loras=max_loras)
    finished = {event.request_id for event in events if isinstance(event, RequestFinished)}
    assert finished == {str(index) for index in range(len(asks))}


def test_a_key_alone_lets_nobody_wait_for_ever():
    """A short request, and a stream without end of long ones, which go first."""
    asks = [(0.01, 24, 4, 0)] * 40 + [(0.0, 4, 4, 0)] + [(0.01, 24, 4, 0)] * 400
    events = run(LONGEST_FIRST, asks, num_pages=26, seats=3, max_loras=None)
    admitted = [event.request_id for event in events if isinstance(event, RequestAdmitted)]
    passed_by = {int(one) for one in admitted[: admitted.index("40")]} - set(range(40))
    # Passed while older ones waited, and then MAX_BYPASS times as the oldest.
    assert MAX_BYPASS / 2 < len(passed_by) <= MAX_BYPASS + 40


@given(
    demands=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 100)), min_size=6, max_size=60),
    refusals=st.lists(st.sampled_from([*[Outcome.ADMITTED] * 4, *Outcome]), max_size=80),
    num_pages=st.integers(8, 60),
    policy=st.sampled_from(["chameleon", "static-queues"]),
)
@settings(max_examples=150)
def test_a_queue_with_work_and_quota_is_never_skipped(demands, refusals, num_pages, policy):
    """After a step, the head of every queue was offered, or needs more than its queue has free; and quotas add up."""
    made = make_policy(policy, policy_context(num_pages=num_pages, policy_options={"refresh_s": 3.0}))
    assert isinstance(made, ChameleonPolicy)
    outcomes = iter(refusals)
    running = []
    for now, (num_prompt, max_tokens) in enumerate(demands):
        made.add(sequence(now, num_prompt=num_prompt, max_tokens=max_tokens, arrived_at=float(now)), float(now))
        made.begin(float(now))
        worn, offered, is_stopped = made._bypass.exhausted, set(), False
        while (one := made.offer()) is not None:
            offered.add(one.seq_id)
            told = next(outcomes, Outcome.ADMITTED)
            made.report(one, told)
            if told is Outcome.ADMITTED:
                one.admitted(float(now), shared=(), pages=())
                running.append(one)
            is_stopped = made._bypass.exhausted is not None
            made.check_integrity()
        assert made._ledger.held <= made._total
        if worn is None and not is_stopped:
            for queue, line in enumerate(made._lines):
                if line.head is not None and line.head.seq_id not in offered:
                    assert made._charge(made._waiting[line.head.seq_id]) > made._ledger.free([queue])
        if len(running) > 3:
            made.finish(running.pop(0), float(now))
            made.check_integrity()


@pytest.mark.slow
@given(
    gap=st.sampled_from([0.002, 0.005, 0.01, 0.02, 0.05, 0.2]),
    share=st.floats(0.05, 0.4),
    num_pages=st.integers(40, 120),
    seats=st.integers(4, 16),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20)
def test_small_requests_wait_no_longer_than_large_ones_under_chameleon_at_any_load(gap, share, num_pages, seats, seed):
    """The guarantee of the fast lane: from an idle engine to many times what it can serve."""
    rng = Random(seed)
    is_large = [rng.random() < share for _ in range(200)]
    asks = [(gap, 24, 24, 7) if large else (gap, 4, 4, 0) for large in is_large]
    events = run("chameleon", asks, num_pages=num_pages, seats=seats, max_loras=None)
    waits: dict[bool, list[float]] = {True: [], False: []}
    arrived: dict[str, float] = {}
    for event in events:
        if isinstance(event, RequestArrived):
            arrived[event.request_id] = event.at
        elif isinstance(event, RequestAdmitted) and event.request_id in arrived:
            waits[is_large[int(event.request_id)]].append(event.at - arrived.pop(event.request_id))
    assert fmean(waits[False]) <= fmean(waits[True] or [math.inf]) + SLACK_S
