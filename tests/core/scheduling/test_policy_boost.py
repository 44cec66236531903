"""Dating back: order of arrival while the line is short, small ones ahead when it is long, and no request starved."""

from __future__ import annotations

from harness import policy_context, sequence, version

from manylora.core.scheduling import Outcome, Sequence
from manylora.core.scheduling.policies.boost import BoostPolicy
from manylora.core.scheduling.policies.fifo import MAX_BYPASS


def boost(prompt_s: float = 0.001) -> BoostPolicy:
    """Return a policy on a device that takes so long for a token of a prompt."""
    return BoostPolicy(policy_context(options=BoostPolicy.Options(), prompt_s=lambda one: prompt_s * one.num_to_run))


def line_up(policy: BoostPolicy, *prompts: int, first_id: int = 0, gap_s: float = 0.1) -> list[Sequence]:
    made = [
        sequence(first_id + index, num_prompt=prompt, max_tokens=8, arrived_at=(first_id + index) * gap_s)
        for index, prompt in enumerate(prompts)
    ]
    for one in made:
        policy.add(one, one.arrived_at)
    return made


def offered(policy: BoostPolicy) -> list[int]:
    """Return who would be offered in a step, in order."""
    policy.begin(0.0)
    return [one.seq_id for one in policy.upcoming(100)]


def admit_one(policy: BoostPolicy) -> Sequence:
    policy.begin(0.0)
    one = policy.offer()
    assert one is not None
    policy.report(one, Outcome.ADMITTED)
    return one


def test_a_short_line_goes_by_arrival():
    policy = boost(prompt_s=1e-5)
    line_up(policy, 20, 20, 8, 20, gap_s=1.0)
    assert offered(policy) == [0, 1, 2, 3]


def test_the_longer_the_line_the_more_a_small_one_passes():
    short, long = boost(prompt_s=2e-4), boost(prompt_s=0.02)
    for policy in (short, long):
        line_up(policy, *[40] * 9, 4)
    assert 0 < offered(short).index(9) < 9
    assert offered(long)[0] == 9


def test_a_large_adapter_counts_against_a_request():
    policy = boost(prompt_s=0.02)
    ones = [sequence(index, num_prompt=8, max_tokens=8, arrived_at=0.0) for index in range(2)]
    ones[0].version, ones[1].version = version("large", num_pages=16), version("small", num_pages=1)
    for one in ones:
        policy.add(one, 0.0)
    assert offered(policy) == [1, 0]


def test_order_follows_the_backlog_down():
    """Once the line has gone, who is left stands by arrival again."""
    policy = boost(prompt_s=0.02)
    made = line_up(policy, 40, *[60] * 20, 4, 4, gap_s=0.5)
    assert admit_one(policy).seq_id == 21
    for one in made[1:21]:
        policy.remove(one)
    assert offered(policy) == [0, 22]


def test_the_oldest_is_passed_so_often_and_no_more():
    policy = boost(prompt_s=0.02)
    line_up(policy, 400)
    admitted: list[int] = []
    for index in range(1, 3 * MAX_BYPASS):
        line_up(policy, 4, 4, first_id=2 * index, gap_s=1e-4)
        admitted.append(admit_one(policy).seq_id)
    assert admitted.index(0) == MAX_BYPASS


def test_a_refused_request_stays_first_in_line():
    policy = boost(prompt_s=0.02)
    line_up(policy, 40)
    policy.begin(0.0)
    one = policy.offer()
    assert one is not None
    policy.report(one, Outcome.NO_PAGES)
    assert policy.offer() is None
    line_up(policy, 4, first_id=1)
    policy.begin(0.0)
    assert policy.first_in_line is one


def test_a_wrong_guess_of_a_length_moves_a_request_a_little():
    """Answers predicted twice as long date a request back less, by at most two halvings of its size."""
    policy = boost(prompt_s=0.01)
    line_up(policy, *[20] * 12, gap_s=0.01)
    keys = [policy._keys[index][0] for index in range(12)]
    twice = sequence(12, num_prompt=20, max_tokens=16, arrived_at=0.11)
    policy.add(twice, 0.11)
    assert 0 < policy._keys[12][0] - keys[11] < policy._scale_s * 2 * 0.7


def test_sequences_leave_nothing_behind():
    policy = boost()
    made = line_up(policy, 4, 8, 16)
    for one in made[:2]:
        policy.remove(one)
    gone = admit_one(policy)
    policy.finish(gone, 1.0)
    assert len(policy) == 0
    assert abs(policy._backlog_s) < 1e-12
    assert not policy._order
    assert policy.queues()[0].num_waiting == 0
