"""Shortest first and adapter-aware order by themselves; and prompts that run whole."""

from __future__ import annotations

from collections.abc import Callable

from harness import make_rig, policy_context, request, sequence, version

from manylora.core.scheduling import Nearness, Outcome, Policy, Sequence
from manylora.core.scheduling.policies.adapter_aware import AdapterAwarePolicy
from manylora.core.scheduling.policies.fifo import MAX_BYPASS
from manylora.core.scheduling.policies.keyed import ShortestFirstPolicy


def step(policy: Policy, outcome: Callable[[Sequence], Outcome], seats: int = 100) -> list[int]:
    """Take a step with so many seats; return who was admitted."""
    admitted: list[int] = []
    policy.begin(0.0)
    while len(admitted) < seats and (one := policy.offer()) is not None:
        told = outcome(one)
        policy.report(one, told)
        if told is Outcome.ADMITTED:
            admitted.append(one.seq_id)
    return admitted


def admit(one: Sequence) -> Outcome:
    return Outcome.ADMITTED


# -- shortest first ----------------------------------------------------------------------------------------------------


def shortest(*lengths_and_times: tuple[int, float], ageing: float = 10.0) -> ShortestFirstPolicy:
    policy = ShortestFirstPolicy(policy_context(options=ShortestFirstPolicy.Options(ageing_tokens_per_s=ageing)))
    for seq_id, (max_tokens, at) in enumerate(lengths_and_times):
        policy.add(sequence(seq_id, max_tokens=max_tokens, arrived_at=at), at)
    return policy


def test_the_shortest_goes_first_among_those_that_came_together():
    assert step(shortest((50, 0), (10, 0), (30, 0)), admit) == [1, 2, 0]


def test_waiting_makes_up_for_length():
    # Ten tokens a second: 50 tokens that came 4 s earlier stand at 10.
    assert step(shortest((50, 0), (9, 4), (11, 4)), admit) == [1, 0, 2]


def test_a_long_request_is_not_starved_by_short_ones_that_keep_coming():
    policy = shortest((500, 0.0))
    at = 0.0
    for seq_id in range(1, 1000):
        at += 1.0
        policy.add(sequence(seq_id, max_tokens=10, arrived_at=at), at)
        if 0 in step(policy, admit, seats=1):
            break
    # It came when length less ageing was even: after 490 / 10 seconds.
    assert 48 <= at <= 51


def test_a_request_that_no_seat_was_free_for_is_passed_by_a_lesser_key():
    policy = shortest((50, 0))
    assert step(policy, admit, seats=0) == []
    policy.add(sequence(1, max_tokens=5, arrived_at=0.1), 0.1)
    assert step(policy, admit, seats=1) == [1]


def test_the_first_in_line_stays_so_until_admitted():
    policy = shortest((50, 0))
    lacks_room = {0}

    def outcome(one: Sequence) -> Outcome:
        return Outcome.ADAPTER_NO_PAGES if one.seq_id in lacks_room else Outcome.ADMITTED

    assert step(policy, outcome) == []
    policy.add(sequence(1, max_tokens=5, arrived_at=0.1), 0.1)
    assert policy.upcoming(5)[0].seq_id == 0
    assert step(policy, outcome) == [1]
    assert policy.first_in_line is not None and policy.first_in_line.seq_id == 0
    for seq_id in range(2, 3 * MAX_BYPASS):
        policy.add(sequence(seq_id, max_tokens=1, arrived_at=0.1), 0.1)
    assert len(step(policy, outcome)) == MAX_BYPASS - 1  # one has passed already
    assert step(policy, outcome) == []
    lacks_room.clear()
    assert step(policy, outcome)[0] == 0


def test_a_preempted_request_comes_back_with_what_is_left_of_it():
    policy = shortest((30, 0))
    started = sequence(1, max_tokens=50)
    policy.add(started, 0.0)
    assert step(policy, admit) == [0, 1]
    started.tokens.extend([0] * 40)
    policy.send_back(started, 1.0)
    policy.add(sequence(2, max_tokens=15), 0.0)
    assert step(policy, admit) == [1, 2]
    assert len(policy) == 0


# -- adapter-aware -----------------------------------------------------------------------------------------------------


def adapter_aware(*nearness: Nearness) -> tuple[AdapterAwarePolicy, dict[int, Nearness]]:
    where = dict(enumerate(nearness))
    policy = AdapterAwarePolicy(policy_context(nearness=lambda one: where.get(one.seq_id, Nearness.DEVICE)))
    for seq_id in where:
        policy.add(sequence(seq_id, adapter=version(f"v{seq_id}")), 0.0)
    return policy, where


def can_run(where: dict[int, Nearness]) -> Callable[[Sequence], Outcome]:
    return lambda one: (
        Outcome.ADMITTED if where.get(one.seq_id, Nearness.DEVICE) is Nearness.DEVICE else Outcome.ADAPTER_LOADING
    )


def test_near_adapters_first_and_by_age_inside_each_class():
    policy, _ = adapter_aware(
        Nearness.DISK, Nearness.HOST, Nearness.LOADING, Nearness.DEVICE, Nearness.HOST, Nearness.DEVICE
    )
    assert step(policy, admit) == [3, 5, 2, 1, 4, 0]


def test_a_cold_request_is_passed_by_no_more_than_the_bound():
    policy, _ = adapter_aware(Nearness.HOST)
    num_admitted = 0
    for seq_id in range(1, 500):
        policy.add(sequence(seq_id), 0.0)
        admitted = step(policy, admit, seats=1)  # only one seat: the cold one is not even looked at
        if admitted == [0]:
            break
        num_admitted += 1
    assert num_admitted == MAX_BYPASS


def test_a_due_request_that_lacks_room_lets_nobody_pass_but_one_that_loads_does():
    policy, _ = adapter_aware(Nearness.HOST)
    for seq_id in range(1, MAX_BYPASS + 1):
        policy.add(sequence(seq_id), 0.0)
        assert step(policy, admit, seats=1) == [seq_id]
    policy.add(sequence(1000), 0.0)
    assert step(policy, lambda one: Outcome.ADAPTER_NO_PAGES if one.seq_id == 0 else Outcome.ADMITTED) == []
    assert step(policy, lambda one: Outcome.ADAPTER_LOADING if one.seq_id == 0 else Outcome.ADMITTED) == [1000]
    assert step(policy, admit) == [0]


def test_first_in_line_for_memory_is_the_first_in_this_order_until_one_is_refused():
    """It alone may take adapters that others wait for, which may be all that is left."""
    policy, _ = adapter_aware(Nearness.HOST, Nearness.DEVICE, Nearness.DEVICE, Nearness.LOADING)
    first = []

    def outcome(one: Sequence) -> Outcome:
        first.append((one.seq_id, policy.first_in_line is one))
        return {2: Outcome.ADMITTED, 3: Outcome.ADAPTER_LOADING}.get(one.seq_id, Outcome.NO_PAGES)

    assert step(policy, outcome) == []
    assert first == [(1, True)]  # nothing is left for another
    policy.remove(next(one for one in policy.upcoming(4) if one.seq_id == 1))
    first.clear()
    assert step(policy, outcome) == [2]
    assert first == [(2, True), (3, True), (0, False)]
    assert policy.first_in_line is not None and policy.first_in_line.seq_id == 3


def test_the_bound_holds_within_one_step_as_well():
    """The oldest comes to be due behind its own refusal, or behind that of another one."""
    policy, _ = adapter_aware(Nearness.HOST)
    for seq_id in range(1, 4 * MAX_BYPASS):
        policy.add(sequence(seq_id), 0.0)
    lacks_room = {0: Outcome.ADAPTER_NO_PAGES}
    assert len(step(policy, lambda one: lacks_room.get(one.seq_id, Outcome.ADMITTED))) == MAX_BYPASS

    policy, _ = adapter_aware(Nearness.HOST, Nearness.DEVICE)
    for seq_id in range(2, 4 * MAX_BYPASS):
        policy.add(sequence(seq_id), 0.0)
    refused = {0: Outcome.ADAPTER_NO_PAGES, 1: Outcome.ADAPTER_CAP}
    first = []

    def outcome(one: Sequence) -> Outcome:
        if policy.first_in_line is one:
            first.append(one.seq_id)
        return refused.get(one.seq_id, Outcome.ADMITTED)

    assert len(step(policy, outcome)) == MAX_BYPASS
    assert first == [1, 0]


# -- whole prompts -----------------------------------------------------------------------------------------------------


def test_without_chunking_a_prompt_runs_whole_and_ends_the_step():
    rig = make_rig(max_num_batched_tokens=10, step_composition="whole-prompts", prefix_caching=False)
    rig.add(request("a", num_prompt=7), request("b", num_prompt=20), request("c", num_prompt=3))
    rig.turn()
    assert [part.num_tokens for part in rig.executor.plan.sequences] == [7, 20]
    rig.step()
    assert [part.num_tokens for part in rig.executor.plan.sequences] == [1, 1, 3]
    rig.drain()
    assert [len(rig.tokens(name)) for name in "abc"] == [4, 4, 4]
