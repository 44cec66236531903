"""First come, first served: order, and the bound on being passed."""

from __future__ import annotations

from harness import make_rig, policy_context, request, sequence

from manylora.core.scheduling import Outcome
from manylora.core.scheduling.policies.fifo import MAX_BYPASS, FifoPolicy


def offered(policy: FifoPolicy, outcome: Outcome) -> list[int]:
    policy.begin(0.0)
    ids = []
    while (one := policy.offer()) is not None:
        ids.append(one.seq_id)
        policy.report(one, outcome)
    return ids


def test_a_preempted_sequence_takes_its_old_place():
    policy = FifoPolicy(policy_context())
    sequences = [sequence(i) for i in range(4)]
    for one in sequences[2:]:
        policy.add(one, 0.0)
    policy.add(sequences[1], 0.0)
    policy.add(sequences[0], 0.0)
    assert offered(policy, Outcome.ADAPTER_LOADING) == [0, 1, 2, 3]
    policy.remove(sequences[1])
    assert offered(policy, Outcome.ADMITTED) == [0, 2, 3]
    assert len(policy) == 0


def test_only_what_cannot_run_is_passed():
    policy = FifoPolicy(policy_context())
    for seq_id in range(3):
        policy.add(sequence(seq_id), 0.0)
    assert offered(policy, Outcome.ADAPTER_LOADING) == [0, 1, 2]
    assert offered(policy, Outcome.ADAPTER_CAP) == [0, 1, 2]
    assert offered(policy, Outcome.NO_PAGES) == [0]


def test_nobody_passes_one_that_was_passed_often_enough():
    policy = FifoPolicy(policy_context())
    first = sequence(0)
    policy.add(first, 0.0)
    num_passed = 0
    for seq_id in range(1, 3 * MAX_BYPASS):
        policy.add(sequence(seq_id), 0.0)
        policy.begin(0.0)
        while (one := policy.offer()) is not None:
            policy.report(one, Outcome.ADAPTER_NO_PAGES if one is first else Outcome.ADMITTED)
            num_passed += one is not first
    assert num_passed == MAX_BYPASS


def test_younger_sequences_preempt_each_other_before_taking_the_adapter_of_the_first_in_line():
    rig = make_rig(num_pages=12, prefix_caching=False)
    rig.register("a", num_pages=4)
    rig.add(request("oldest", num_prompt=20, max_tokens=4, model="a"))
    rig.add(request("young", num_prompt=16, max_tokens=8), request("youngest", num_prompt=16, max_tokens=8))
    rig.turn()
    rig.executor.complete_load()
    rig.drain()
    stats = rig.core.stats()
    assert stats.num_preemptions >= 1
    assert (stats.num_loads, stats.num_evictions) == (1, 0)
