"""Chameleon's queues: the examples of figure 10, the bypass story of section 4.3.3, and the choices of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import make_rig, policy_context, request, sequence, version

from manylora.core.events import RequestSquashed
from manylora.core.scheduling import Nearness, Outcome, Sequence
from manylora.core.scheduling.policies.chameleon.policy import ChameleonPolicy
from manylora.core.scheduling.policies.chameleon.queue_plan import QueuePlan
from manylora.core.scheduling.policies.chameleon.quota import QuotaLedger
from manylora.core.scheduling.policies.fifo import MAX_BYPASS

# Sizes are answer lengths over 100: small below 0.2, medium below 0.6. Demands are prompt and answer, twice the length.
SMALL, MEDIUM, LARGE = 10, 40, 100


class Planned(ChameleonPolicy):
    """Chameleon with queues set by hand."""

    def __init__(self, quotas: tuple[int, ...], **context: object) -> None:
        super().__init__(policy_context(options=ChameleonPolicy.Options(request_size="output"), **context))  # type: ignore[arg-type]
        self.fixed = QueuePlan((0.2, 0.6)[: len(quotas) - 1], quotas)
        self._sizer._max_output = 100
        self._plan = self.fixed
        self._ledger = QuotaLedger(quotas)
        self._lines = [type(self._lines[0])() for _ in quotas]


def fill(policy: ChameleonPolicy, *lengths: int, first_id: int = 0) -> list[Sequence]:
    """Let requests arrive with prompts and answers of these lengths."""
    made = []
    for index, length in enumerate(lengths):
        one = sequence(first_id + index, num_prompt=length, max_tokens=length)
        policy.add(one, 0.0)
        made.append(one)
    return made


def step(policy: ChameleonPolicy, outcome: Callable[[Sequence], Outcome] = lambda one: Outcome.ADMITTED) -> list[int]:
    """Take a step; return who was admitted."""
    admitted = []
    policy.begin(0.0)
    while (one := policy.offer()) is not None:
        told = outcome(one)
        if told is Outcome.ADMITTED:
            one.admitted(0.0, shared=(), pages=())
            admitted.append(one.seq_id)
        policy.report(one, told)
        policy.check_integrity()
    return admitted


def end(policy: ChameleonPolicy, one: Sequence) -> None:
    policy.finish(one, 1.0)


def test_figure_10a_no_spare_tokens():
    """Each queue admits what its quota holds; the fourth small one stays, and there is no second pass."""
    policy = Planned((60, 170, 200))
    # Demands: small 20 each, medium 80 each, large 200 each.
    small = fill(policy, SMALL, SMALL, SMALL, SMALL)
    medium = fill(policy, MEDIUM, MEDIUM, MEDIUM, first_id=10)
    fill(policy, LARGE, LARGE, first_id=20)
    assert step(policy) == [0, 1, 2, 10, 11, 20]
    assert [status.num_waiting for status in policy.queues()] == [1, 1, 1]
    assert [status.used_tokens for status in policy.queues()] == [60, 160, 200]
    # Ten tokens of the medium quota are free, and its queue is not empty: nothing is spare.
    assert step(policy) == []
    end(policy, small[1])
    end(policy, medium[0])
    assert step(policy) == [3, 12]


def test_figure_10b_spare_tokens_are_lent_small_queues_first():
    """The medium queue runs empty; what it leaves admits the fourth small request and is too little for the large."""
    policy = Planned((60, 170, 200))
    small = fill(policy, SMALL, SMALL, SMALL, SMALL)
    medium = fill(policy, MEDIUM, first_id=10)
    fill(policy, LARGE, LARGE, first_id=20)
    # Pass 1: three small, the medium, one large. Spare 170 - 80 = 90: the small one takes 20, the large would need 200.
    assert step(policy) == [0, 1, 2, 10, 20, 3]
    assert [status.used_tokens for status in policy.queues()] == [60, 100, 200]
    # The loan goes back to the lender, not to the borrower's queue.
    end(policy, small[3])
    assert [status.used_tokens for status in policy.queues()] == [60, 80, 200]
    end(policy, medium[0])
    assert [status.used_tokens for status in policy.queues()] == [60, 0, 200]


def test_a_queue_with_work_lends_nothing():
    policy = Planned((60, 170, 200))
    fill(policy, *[SMALL] * 5)
    fill(policy, MEDIUM, MEDIUM, MEDIUM, first_id=10)
    # Ten tokens of the medium quota stay free: it has work. The large queue is empty and lends 20, 20 and 80.
    assert step(policy) == [0, 1, 2, 10, 11, 3, 4, 12]
    assert [status.used_tokens for status in policy.queues()] == [60, 160, 120]


def test_a_request_larger_than_its_queues_quota_runs_once_the_queue_holds_nothing_else():
    policy = Planned((60, 170, 90))
    large = fill(policy, LARGE, LARGE)
    small = fill(policy, *[SMALL] * 4, first_id=10)
    fill(policy, *[MEDIUM] * 3, first_id=20)  # no queue has tokens to lend
    assert step(policy) == [10, 11, 12, 20, 21, 0]
    assert policy.queues()[2].used_tokens == 90
    end(policy, small[0])
    assert step(policy) == [13]  # the fast lane stays open meanwhile
    end(policy, large[0])
    assert step(policy) == [1]


def test_first_in_line_for_memory_is_the_oldest_that_has_its_quota():
    """One without quota is not offered, and no other may drop adapters that waiting requests need."""
    policy = Planned((60, 170, 200))
    running, waiting = fill(policy, LARGE, LARGE)
    small = fill(policy, SMALL, first_id=10)[0]
    assert step(policy, lambda one: Outcome.ADMITTED if one is running else Outcome.NO_PAGES) == [0]
    assert waiting.seq_id < small.seq_id
    step(policy, lambda one: Outcome.NO_PAGES)
    assert policy.first_in_line is small
    end(policy, running)
    step(policy, lambda one: Outcome.NO_PAGES)
    assert policy.first_in_line is waiting


def test_the_first_plan_comes_with_the_hundredth_request_and_then_when_their_number_doubles():
    policy = ChameleonPolicy(
        policy_context(options=ChameleonPolicy.Options(request_size="output", refresh_s=300.0), num_pages=100_000)
    )
    plans = []
    for index in range(450):
        one = sequence(index, max_tokens=(2, 50)[index % 2], arrived_at=index / 10)
        policy.add(one, one.arrived_at)
        before = policy._plan
        policy.begin(one.arrived_at)
        while (offered := policy.offer()) is not None:
            offered.admitted_at = one.arrived_at
            policy.report(offered, Outcome.ADMITTED)
        if policy._plan is not before:
            plans.append(index + 1)
    assert plans == [100, 200, 400]
    assert len(policy.queues()) == 2
    # Then every refresh_s.
    before = policy._plan
    policy.begin(100 / 10 + 299)
    assert policy._plan is before
    policy.begin(100 / 10 + 301)
    assert policy._plan is not before
    policy.check_integrity()


# -- bypass ----------------------------------------------------------------------------------------------------------


class Bypassing:
    """One queue; the older request R1 needs an adapter of 10 pages that there is no room for."""

    def __init__(self, free_pages: int = 3) -> None:
        self.free_pages = free_pages
        self.big = version("big", num_pages=10)
        self.policy = ChameleonPolicy(
            policy_context(
                options=ChameleonPolicy.Options(),
                num_pages=1000,
                nearness=lambda one: Nearness.HOST if one.adapter == "big" else Nearness.DEVICE,
                num_claimable_pages=lambda is_first: self.free_pages,
            )
        )
        # A running request with 20 tokens to go, which holds 9 pages: R1 can run when it ends.
        self.runner = sequence(0, num_prompt=33, max_tokens=20)
        self.policy.add(self.runner, 0.0)
        assert self.step() == [0]
        self.run(self.runner, pages=9)
        self.older = sequence(1, num_prompt=4, max_tokens=5, adapter=self.big)
        self.policy.add(self.older, 0.0)

    def run(self, one: Sequence, pages: int) -> None:
        one.table.grow(range(pages))
        one.launched(len(one.tokens) - 1)
        one.took_chunk(0.1)

    def step(self) -> list[int]:
        def outcome(one: Sequence) -> Outcome:
            return Outcome.ADAPTER_NO_PAGES if one.adapter == "big" else Outcome.ADMITTED

        return step(self.policy, outcome)

    def arrive(self, seq_id: int, max_tokens: int) -> Sequence:
        one = sequence(seq_id, num_prompt=4, max_tokens=max_tokens)
        self.policy.add(one, 0.0)
        return one


def test_a_younger_request_passes_only_if_it_ends_before_the_memory_comes():
    story = Bypassing()
    story.arrive(2, max_tokens=21)
    assert story.step() == []
    story.arrive(3, max_tokens=20)  # as long as the runner has: ends with it
    assert story.step() == [3]
    assert story.policy.squash(1.0) == []


def test_a_passer_is_squashed_when_the_older_could_run_after_all():
    story = Bypassing()
    young = story.arrive(2, max_tokens=10)
    assert story.step() == [2]
    story.run(young, pages=1)
    assert story.policy.squash(1.0) == []  # one page of it would not help: 11 are needed
    # The runner ends early, and its pages go to something else but for 7: with the 3 free that makes 10 of 11.
    story.policy.finish(story.runner, 1.0)
    story.free_pages = 10
    assert story.policy.squash(1.0) == [young]
    # With 11 free no request is squashed.
    story.free_pages = 11
    assert story.policy.squash(1.0) == []


def test_as_few_as_it_takes_are_squashed_and_the_youngest_first():
    story = Bypassing()
    young = [story.arrive(seq_id, max_tokens=5) for seq_id in (2, 3, 4)]
    assert story.step() == [2, 3, 4]
    for one in young:
        story.run(one, pages=2)
    story.free_pages = 7
    assert story.policy.squash(1.0) == [young[2], young[1]]


def test_one_that_lacks_tokens_is_first_in_line_once_those_that_passed_it_are_squashed():
    """A younger one of another queue that has its quota does not take the memory that squashing frees."""
    policy = Planned(
        (60, 130),
        nearness=lambda one: Nearness.HOST if one.adapter == "big" else Nearness.DEVICE,
        num_claimable_pages=lambda is_first: 60 if is_first else 0,
    )
    fill(policy, MEDIUM)
    assert step(policy) == [0]  # holds 80 tokens
    policy.add(sequence(1, num_prompt=2, max_tokens=30, adapter=version("big", num_pages=1)), 0.0)
    passer = sequence(2, num_prompt=2, max_tokens=29)
    policy.add(passer, 0.0)
    young = fill(policy, SMALL, first_id=3)[0]
    outcomes = {1: Outcome.ADAPTER_NO_PAGES, 3: Outcome.NO_PAGES}
    assert step(policy, lambda one: outcomes.get(one.seq_id, Outcome.ADMITTED)) == [2]
    step(policy, lambda one: outcomes[one.seq_id])
    assert policy.first_in_line is young
    assert policy.squash(1.0) == [passer]


def test_nobody_is_squashed_for_one_whose_adapter_came_after_all():
    story = Bypassing()
    young = story.arrive(2, max_tokens=5)
    story.step()
    story.run(young, pages=2)
    story.free_pages = 9
    assert story.policy.squash(1.0) == [young]
    story.older.adapter = None
    assert story.policy.squash(1.0) == []


def test_passing_is_bounded_whatever_is_predicted():
    story = Bypassing()
    num_passed = 0
    for seq_id in range(2, 3 * MAX_BYPASS):
        story.arrive(seq_id, max_tokens=1)
        num_passed += len(story.step())
    assert num_passed == MAX_BYPASS
    assert story.policy.first_in_line is story.older


def test_tokens_are_kept_for_one_whose_adapter_is_on_its_way():
    policy = Planned((60,), nearness=lambda one: Nearness.LOADING)
    fill(policy, SMALL, SMALL, SMALL, SMALL)
    loading = {0}
    outcome = lambda one: Outcome.ADAPTER_LOADING if one.seq_id in loading else Outcome.ADMITTED  # noqa: E731
    assert step(policy, outcome) == [1, 2]  # of 60 tokens, 20 are kept for the oldest
    loading.clear()
    assert step(policy, outcome) == [0]


def test_an_adapter_in_use_is_charged_once():
    policy = ChameleonPolicy(policy_context(options=ChameleonPolicy.Options(), num_pages=100))
    adapter = version("a", num_pages=10)
    for seq_id in range(2):
        policy.add(sequence(seq_id, num_prompt=10, max_tokens=5, adapter=adapter), 0.0)
    assert step(policy) == [0, 1]
    assert policy.queues()[0].used_tokens == 15 + 10 * 4 + 15


def test_squashed_work_is_redone_with_the_same_tokens():
    """The story on the real core: an older request lacks adapter memory, a younger passes, and is squashed for it."""
    rig = make_rig(
        num_pages=40, policy="chameleon", predictor="oracle", prefix_caching=False, max_num_batched_tokens=64
    )
    rig.register("pinned", num_pages=14)
    rig.core.adapters.pin("pinned", True, rig.now)
    rig.register("big", num_pages=20)
    rig.add(request("runner", num_prompt=36, max_tokens=30))
    rig.turn()
    rig.step()
    rig.add(request("older", num_prompt=4, max_tokens=4, model="big"))
    rig.step()
    rig.add(request("young", num_prompt=24, max_tokens=12))
    for _ in range(4):
        rig.step()
    assert rig.core.stats().num_running == 2
    rig.core.cancel("runner", rig.now)  # ends earlier than predicted
    rig.drain()
    assert [event.request_id for event in rig.events if isinstance(event, RequestSquashed)] == ["young"]
    assert rig.core.stats().num_squashes == 1
    finished = [output.request_id for outputs in rig.outputs.values() for output in outputs if output.finish]
    assert sorted(finished) == ["older", "runner", "young"]

    alone = make_rig(prefix_caching=False)
    alone.add(request("young", num_prompt=24, max_tokens=12))
    alone.drain()
    assert rig.tokens("young") == alone.tokens("young")


@pytest.mark.parametrize("policy", ["chameleon", "static-queues"])
def test_queues_can_be_seen(policy):
    rig = make_rig(policy=policy, num_pages=50)
    rig.add(request("r"))
    rig.turn()
    (queue,) = rig.core.stats().queues
    assert (queue.num_waiting, queue.num_running, queue.quota_tokens, queue.below) == (0, 1, 200, None)
    assert queue.used_tokens == 9
