"""Step compositions, by name, on the fake executor."""

from __future__ import annotations

import pytest
from harness import make_rig, policy_context, request, sequence
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.config import AdapterConfig
from manylora.core.engine.steps.admission import most_pages_together
from manylora.core.errors import ConfigError
from manylora.core.events import RequestPreempted, StepLaunched
from manylora.core.scheduling import STEP_COMPOSITIONS, Outcome, make_step_composition
from manylora.core.scheduling.policies.fifo import StrictFifoPolicy


def tokens_in_flight(rig) -> list[int]:
    return [part.num_tokens for part in rig.executor.plan.sequences] if rig.executor.plan else []


def test_prompts_run_in_steps_of_their_own():
    rig = make_rig(step_composition="s-lora-each-step")
    rig.add(request("a", num_prompt=7))
    rig.step()
    rig.add(request("b", num_prompt=5), request("c", num_prompt=6))
    rig.step()
    assert tokens_in_flight(rig) == [5, 6]
    rig.step()
    assert tokens_in_flight(rig) == [1, 1, 1]
    rig.drain()


def test_so_many_steps_run_between_two_admissions():
    rig = make_rig(step_composition="s-lora")
    rig.add(request("a", max_tokens=20))
    rig.step()
    rig.add(request("b", max_tokens=2))
    steps = []
    for _ in range(12):
        steps.append(tokens_in_flight(rig))
        rig.step()
    assert steps == [[5], *[[1]] * 10, [5]]
    rig.drain()


def test_prefetches_at_the_steps_of_s_lora_are_all_at_once():
    rig = make_rig(step_composition="s-lora-prefetch", num_pages=64)
    for name in "xyz":
        rig.register(name)
    rig.add(request("runs", max_tokens=30))
    rig.step()
    rig.add(*[request(name, model=name) for name in "xyz"])
    loads = []
    for _ in range(9):
        loads.append(len(rig.executor.loads))
        rig.step()
    assert loads == [0, 0, 0, 0, 0, 3, 0, 0, 0], "none before the fifth decode step, then all"
    rig.drain()


def test_nobody_waits_for_an_admission_when_nothing_runs():
    rig = make_rig(step_composition="s-lora")
    for name in "abc":
        rig.add(request(name, max_tokens=1))
        rig.step()
        rig.step()
        assert rig.finish(name) == "length"


def test_a_step_waits_for_the_adapters_of_those_it_lets_in():
    rig = make_rig(step_composition="s-lora-chunked", adapters=AdapterConfig(look_ahead=0), policy="strict-fifo")
    rig.register("x")
    rig.register("y")
    rig.add(request("runs", max_tokens=20))
    rig.step()
    rig.add(request("cold", model="x"), request("colder", model="y"), request("warm"))
    rig.executor.complete_step()
    rig.turn()
    assert rig.executor.plan is None, "decoding waits for the first copy"
    rig.executor.complete_load()
    rig.turn()
    assert rig.executor.plan is None, "and for the second"
    rig.executor.complete_load()
    rig.turn()
    assert tokens_in_flight(rig) == [1, 5, 5, 5]
    rig.drain()


def test_a_failed_load_lets_the_step_go():
    rig = make_rig(step_composition="s-lora-chunked", adapters=AdapterConfig(look_ahead=0))
    rig.register("x")
    rig.add(request("runs", max_tokens=5))
    rig.step()
    rig.add(request("cold", model="x"))
    rig.executor.complete_step()
    rig.turn()
    rig.executor.complete_load(error="gone")
    rig.turn()
    assert rig.finish("cold") == "error"
    assert tokens_in_flight(rig) == [1]
    rig.drain()


def test_reserving_answers_leaves_nobody_to_preempt():
    for reserve_output in ("none", "whole", "peak"):
        rig = make_rig(num_pages=10, prefix_caching=False, reserve_output=reserve_output)
        for name in "abcd":
            rig.add(request(name, num_prompt=4, max_tokens=16))
        rig.drain()
        assert any(isinstance(event, RequestPreempted) for event in rig.events) is (reserve_output == "none")
        most = max(event.num_sequences for event in rig.events if isinstance(event, StepLaunched))
        assert most == (4 if reserve_output == "none" else 2)


def test_at_the_peak_more_run_than_with_whole_answers_reserved():
    most = {}
    for reserve_output in ("whole", "peak"):
        rig = make_rig(num_pages=13, prefix_caching=False, reserve_output=reserve_output)
        rig.add(*[request(f"{length}", num_prompt=4, max_tokens=length) for length in (4, 8, 15, 16)])
        rig.drain()
        assert not any(isinstance(event, RequestPreempted) for event in rig.events)
        most[reserve_output] = max(event.num_sequences for event in rig.events if isinstance(event, StepLaunched))
    assert most["whole"] < most["peak"]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=8), st.integers(1, 8))
def test_the_peak_bounds_every_moment(sequences, block_size):
    """Against all steps one by one; with pages of one token it is exact."""
    peak = 0
    for step in range(max(left for _, left in sequences) + 1):
        peak = max(peak, sum(-(-(now + step) // block_size) for now, left in sequences if left >= step))
    bound = most_pages_together(sequences, block_size)
    assert bound >= peak and (block_size > 1 or bound == peak)


def test_nobody_passes_under_strict_fifo():
    policy = StrictFifoPolicy(policy_context())
    for seq_id in range(3):
        policy.add(sequence(seq_id), 0.0)
    for outcome in (Outcome.ADAPTER_LOADING, Outcome.ADAPTER_CAP, Outcome.ADAPTER_NO_PAGES, Outcome.NO_PAGES):
        policy.begin(0.0)
        head = policy.offer()
        assert head is policy.first_in_line is policy.upcoming(1)[0]
        policy.report(head, outcome)
        assert policy.offer() is None
    policy.begin(0.0)
    while (one := policy.offer()) is not None:
        policy.report(one, Outcome.ADMITTED)
    assert len(policy) == 0


def test_a_composition_is_found_by_name():
    with pytest.raises(ConfigError, match="expected one of mixed, s-lora"):
        make_rig(step_composition="no such")
    with pytest.raises(ConfigError, match="lacks most_tokens"):
        make_step_composition("builtins:object")


@pytest.mark.parametrize("name", sorted(STEP_COMPOSITIONS))
def test_no_step_holds_more_tokens_than_its_composition_says(name):
    rig = make_rig(step_composition=name, max_num_batched_tokens=8, max_model_len=64, prefix_caching=False)
    for index in range(6):
        rig.add(request(str(index), num_prompt=(3, 30)[index % 2], max_tokens=12))
    rig.drain()
    largest = max(event.num_tokens for event in rig.events if isinstance(event, StepLaunched))
    assert largest <= make_step_composition(name).most_tokens(8, 30)
