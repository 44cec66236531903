"""Fair shares: the bound on what two tenants may drift apart, weights, returns from idle, and what fairness leaves."""

from __future__ import annotations

from collections import Counter, deque
from itertools import combinations
from math import ceil

import pytest
from harness import policy_context, sequence, small_base, version
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.clock import Clock, VirtualClock, WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.errors import ConfigError, RequestError
from manylora.core.events import (
    AdapterLoadStarted,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestSquashed,
    StepFinished,
    TokensEmitted,
)
from manylora.core.ports import CoreParts
from manylora.core.scheduling import POLICIES, Outcome, make_policy
from manylora.core.scheduling.policies.fair import FairPolicy
from manylora.core.scheduling.policies.fair_shares import LEAST_CHUNK, LEAST_SPREAD, NUM_PAST, SPREAD_OVER
from manylora.core.types import Request, SamplingParams, Tier
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor

BLOCK, LONGEST_PROMPT = 4, 24
PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0
NUM_ADAPTERS = 6
SLOW_COPIES = FixedCost(copy_bytes_per_s=1e5)


class Ask:
    """One request of a tenant."""

    def __init__(
        self, tenant: str, num_prompt: int, num_output: int, *, adapter: int = -1, weight: float = 1.0
    ) -> None:
        self.tenant, self.num_prompt, self.num_output = tenant, num_prompt, num_output
        self.adapter, self.weight = adapter, weight

    def request(self, index: int) -> Request:
        return Request(
            request_id=f"{self.tenant}/{index}",
            prompt=(1,) * self.num_prompt,
            sampling=SamplingParams(max_tokens=self.num_output, ignore_eos=True),
            model=f"a{self.adapter}" if self.adapter >= 0 else "",
            tenant=self.tenant,
            weight=self.weight,
        )


def engine(
    events: list[Event],
    *,
    num_pages: int,
    seats: int,
    policy: str = "fair",
    cost: FixedCost = SLOW_COPIES,
    **options: object,
) -> EngineCore:
    core = EngineCore(
        CoreParts(
            base=small_base(max_model_len=64),
            num_pages=num_pages,
            executor=SimulatedExecutor(cost, vocab_size=1000),
        ),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=SchedulerConfig(
                policy=policy,
                policy_options=options,
                max_num_seqs=seats,
                max_num_batched_tokens=16,
                max_waiting=10_000,
                predictor="oracle",
            ),
            memory=MemoryConfig(block_size=BLOCK, prefix_caching=False),
        ),
        sinks=[events.append],
    )
    for index in range(NUM_ADAPTERS):
        core.adapters.register(f"a{index}", version(f"k{index}", num_pages=1 + index), 0.0)
    return core


def run(asks: list[tuple[float, Ask]], *, clock: Clock | None = None, **options: object) -> list[Event]:
    """Run requests at their times to the end, by default on the virtual clock."""
    events: list[Event] = []
    core = engine(events, **options)  # type: ignore[arg-type]
    arrivals = [(at, ask.request(index)) for index, (at, ask) in enumerate(asks)]
    loop = EngineLoop(core, clock or VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=arrivals)
    loop.run()
    core.check_integrity()
    return events


def served(events: list[Event], asks: list[Ask]) -> list[tuple[Counter[str], Counter[str]]]:
    """Return after each step each tenant's service so far, by the prices, and its requests that still wait."""
    by_id = {ask.request(index).request_id: ask for index, ask in enumerate(asks)}
    service: Counter[str] = Counter()
    waiting = Counter(ask.tenant for ask in asks)
    admitted: set[str] = set()
    seen = [(service.copy(), waiting.copy())]
    for event in events:
        if isinstance(event, RequestAdmitted) and event.request_id not in admitted:
            admitted.add(event.request_id)
            ask = by_id[event.request_id]
            service[ask.tenant] += PROMPT_PRICE * ask.num_prompt
            waiting[ask.tenant] -= 1
        elif isinstance(event, TokensEmitted):
            for request_id in event.request_ids:
                service[by_id[request_id].tenant] += OUTPUT_PRICE
        elif isinstance(event, StepFinished):
            seen.append((service.copy(), waiting.copy()))
    return seen


def widest_drift(
    seen: list[tuple[Counter[str], Counter[str]]], one: str, other: str, weights: dict[str, float]
) -> float:
    """Return the most that the services of two tenants differ, by weight, over any time in which both wait."""
    gaps = [
        service[one] / weights[one] - service[other] / weights[other]
        for service, waiting in seen
        if waiting[one] and waiting[other]
    ]
    return max(gaps, default=0.0) - min(gaps, default=0.0)


@given(
    tenants=st.lists(
        st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, 24), st.sampled_from([1.0, 1.0, 2.0, 5.0])),
        min_size=2,
        max_size=4,
    ),
    num_pages=st.integers(22, 40),
    seats=st.integers(1, 6),
    within=st.sampled_from(["fifo", "sjf", "boost"]),  # Chameleon's quotas may leave a tenant with nothing to offer
)
@settings(max_examples=25, deadline=None)
def test_no_two_backlogged_tenants_drift_apart_by_more_than_the_bound(tenants, num_pages, seats, within):
    """Theorem 4.4 of the paper: whatever the lengths, the seats, the memory, the weights and the order inside."""
    asks = [
        Ask(f"t{number}", num_prompt, num_output, weight=weight)
        for _ in range(25)
        for number, (num_prompt, num_output, weight) in enumerate(tenants)
    ]
    options = {"fair_within": within, "fair_burst_s": 0}
    seen = served(run([(0.0, ask) for ask in asks], num_pages=num_pages, seats=seats, **options), asks)
    weights = {f"t{number}": weight for number, (_, _, weight) in enumerate(tenants)}
    bound = 2 * max(PROMPT_PRICE * LONGEST_PROMPT, OUTPUT_PRICE * num_pages * BLOCK)
    for one, other in combinations(sorted(weights), 2):
        assert widest_drift(seen, one, other, weights) <= bound


def test_the_bound_and_the_weights_hold_on_the_wall_clock():
    """The loop of a server, in real time over a simulated device: the same code decides."""
    asks = [Ask(f"t{index % 2}", 4 + index % 7, 20, weight=1.0 + 2 * (index % 2)) for index in range(300)]
    options = {"num_pages": 22, "seats": 3, "fair_burst_s": 0, "cost": FixedCost(step_s=1e-4, token_s=0.0)}
    seen = served(run([(0.0, ask) for ask in asks], clock=WallClock(), **options), asks)
    assert widest_drift(seen, "t0", "t1", {"t0": 1.0, "t1": 3.0}) <= 2 * OUTPUT_PRICE * 22 * BLOCK
    service = [service for service, waiting in seen if waiting["t0"] and waiting["t1"]][-1]
    assert service["t1"] / service["t0"] == pytest.approx(3.0, rel=0.05)


def test_fifo_breaks_the_bound():
    """The bound is one that can be broken: by arrival, tenants get what they ask for."""
    asks = [Ask("t0", 4, 20)] * 200 + [Ask("t1", 4, 20)] * 200
    seen = served(run([(0.0, ask) for ask in asks], num_pages=22, seats=2, policy="fifo"), asks)
    assert widest_drift(seen, "t0", "t1", {"t0": 1.0, "t1": 1.0}) > 10 * OUTPUT_PRICE * 22 * BLOCK


@given(
    asks=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.05, 1.0]),
            st.integers(0, 3),
            st.integers(1, 24),
            st.integers(1, 24),
            st.integers(-1, NUM_ADAPTERS - 1),
        ),
        min_size=1,
        max_size=60,
    ),
    num_pages=st.integers(22, 40),
    seats=st.integers(1, 6),
    within=st.sampled_from(["fifo", "chameleon", "adapter-aware", "strict-fifo"]),
)
@settings(max_examples=40, deadline=None)
def test_every_request_of_every_tenant_ends_and_no_counter_is_left(asks, num_pages, seats, within):
    events: list[Event] = []
    core = engine(events, num_pages=num_pages, seats=seats, fair_within=within)
    at, arrivals = 0.0, []
    for index, (gap, tenant, num_prompt, num_output, adapter) in enumerate(asks):
        at += gap
        arrivals.append((at, Ask(f"t{tenant}", num_prompt, num_output, adapter=adapter).request(index)))
    EngineLoop(core, VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
    core.check_integrity()
    assert sum(isinstance(event, RequestFinished) for event in events) == len(asks)
    policy = core._policy
    assert isinstance(policy, FairPolicy) and len(policy) == 0 and not policy._running
    left, floor = policy._tenants.values(), policy._counters.floor
    assert all(one.counter > floor or one.is_indebted for one in left), "forgotten when the next begins to wait"


@pytest.mark.parametrize("within", sorted(set(POLICIES) - {"fair"}))
def test_a_tenant_alone_is_served_as_by_the_policy_inside(within):
    asks = [(0.01 * index, Ask("t", 1 + index % 20, 1 + index % 13, adapter=index % 7 - 1)) for index in range(120)]
    alone = run(asks, num_pages=26, seats=4, policy=within)
    assert run(asks, num_pages=26, seats=4, fair_within=within) == alone


def order_of(made: FairPolicy, count: int, now: float = 0.0) -> list[str]:
    """Admit sequences one by one; return their tenants."""
    made.begin(now)
    names = []
    while len(names) < count and (one := made.offer()) is not None:
        one.admitted(0.0, shared=(), pages=())
        made.report(one, Outcome.ADMITTED)
        names.append(one.request.tenant)
    return names


def fair(*, max_num_seqs: int = 128, **options: object) -> FairPolicy:
    made = make_policy("fair", policy_context(policy_options=options, max_num_seqs=max_num_seqs))
    assert isinstance(made, FairPolicy)
    return made


@pytest.mark.parametrize("burst_s", [0, 4])
def test_a_tenant_that_comes_back_has_saved_up_no_more_than_the_burst(burst_s):
    made = fair(fair_burst_s=burst_s)
    for index in range(20):
        made.add(sequence(index, tenant="always"), 0.0)
    for second in range(11):
        assert order_of(made, 1, float(second)) == ["always"]
    for index in range(20, 40):
        made.add(sequence(index, tenant="back"), 10.0)
    order = order_of(made, burst_s + 8, 10.0)
    assert order[:burst_s] == ["back"] * burst_s, "one was admitted in each second"
    assert Counter(order[burst_s:]) == {"always": 4, "back": 4}


def step(made: FairPolicy, now: float, seats: int) -> None:
    """Admit while there are seats, generate a token of each running sequence, and end those that are whole."""
    assert not made.squash(now), "no sequence is offered again here"
    made.begin(now)
    while len(made._running) < seats and (one := made.offer()) is not None:
        one.admitted(0.0, shared=(), pages=())
        made.report(one, Outcome.ADMITTED)
    for one in [running.sequence for running in made._running.values()]:
        one.tokens.append(0)
        if len(one.tokens) == len(one.request.prompt) + one.max_tokens:
            made.finish(one, now)


@pytest.mark.parametrize("burst_s", [0.0, 5.0])
@pytest.mark.parametrize("is_backlogged", [True, False])
def test_a_tenant_that_comes_beside_long_answers_has_saved_up_no_more_than_the_burst(burst_s, is_backlogged):
    """Nobody is admitted for long, and the service of those that run is no claim of one that was not there."""
    made = fair(fair_burst_s=burst_s)
    for index in range(8 if is_backlogged else 4):
        made.add(sequence(index, max_tokens=2000, tenant="long"), 0.0)
    for tenth in range(1000):
        step(made, tenth / 10, 4)
    made.add(sequence(8, tenant="new"), 100.0)
    per_s = 4 * 10 * OUTPUT_PRICE
    claim = made._tenants["long"].counter - made._tenants["new"].counter
    assert burst_s * per_s <= claim <= (burst_s + 2 * max(1.0, burst_s) / NUM_PAST) * per_s


@given(
    asks=st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(0, 3), st.integers(1, 24), st.integers(1, 200), st.sampled_from([1.0, 4.0])
        ),
        min_size=4,
        max_size=20,
    ),
    seats=st.integers(1, 3),
    burst_s=st.sampled_from([0.0, 1.0, 4.0]),
)
@settings(max_examples=40, deadline=None)
def test_a_newcomer_is_lifted_to_the_least_counter_of_those_that_waited_before_the_burst(asks, seats, burst_s):
    """Algorithm 2 of the paper, a burst late, whatever was admitted meanwhile."""
    made = fair(max_num_seqs=10**6, fair_burst_s=burst_s)  # so many seats that no sequence is squashed
    least: list[float] = []  # of those that wait, after each step of a tenth of a second
    num_looks = 2 + ceil(20 * max(1.0, burst_s) / NUM_PAST)  # steps in which virtual time is seen at least once
    for index, (gap, number, num_prompt, num_output, weight) in enumerate(asks):
        for _ in range(gap):
            step(made, len(least) / 10, seats)
            made._charge_answers()
            least.append(min((one.counter for one in made._tenants.values() if len(one.policy)), default=0.0))
        now, name = len(least) / 10, f"t{number}"
        one = sequence(index, num_prompt=num_prompt, max_tokens=num_output, tenant=name, weight=weight * (1 + number))
        is_new = name not in made._tenants or not len(made._tenants[name].policy)
        made.add(one, now)
        lasted = [min(least[end - num_looks : end]) for end in range(num_looks, len(least) - int(10 * burst_s))]
        assert not is_new or made._tenants[name].counter >= max(lasted, default=0.0)


def test_a_tenant_that_goes_and_comes_back_keeps_its_debt():
    made = fair(fair_burst_s=0)
    made.add(sequence(0, num_prompt=48, tenant="large"), 0.0)
    for index in range(1, 40):
        made.add(sequence(index, num_prompt=5, tenant="small"), 0.0)
    first = order_of(made, 1)
    assert first == ["large"], "the first to wait"
    made.add(sequence(50, num_prompt=50, tenant="large"), 0.0)
    assert order_of(made, 11) == [*["small"] * 10, "large"]


@pytest.mark.parametrize("burst_s", [0.0, 5.0])
def test_no_memory_grows_with_what_was_served(burst_s):
    made = fair(fair_burst_s=burst_s)
    for index in range(400):
        made.add(sequence(2 * index, tenant="always"), float(index))
        made.add(sequence(2 * index + 1, tenant=f"t{index}"), float(index))
        order_of(made, 1 + index % 2, float(index))
        while len(made._running) > 4:
            done = next(iter(made._running.values())).sequence
            made.finish(done, float(index))
    assert len(made._counters.past) <= NUM_PAST + 1
    assert len(made._tenants) < 10, "of 401, of which one waits"


def test_weights_divide_what_is_served():
    made = fair()
    for index in range(100):
        made.add(sequence(2 * index, tenant="one"), 0.0)
        made.add(sequence(2 * index + 1, tenant="three", weight=3.0), 0.0)
    assert Counter(order_of(made, 80)) == {"one": 20, "three": 60}


def test_the_load_of_an_adapter_is_paid_once_by_the_request_that_it_serves_first():
    asks = [(0.0, Ask("t", 4, 8, adapter=5)), (0.0, Ask("t", 4, 8, adapter=5)), (5.0, Ask("t", 4, 8, adapter=5))]
    events: list[Event] = []
    core = engine(events, num_pages=40, seats=4, load_price=1.0)
    arrivals = [(at, ask.request(index)) for index, (at, ask) in enumerate(asks)]
    EngineLoop(core, VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
    loads = [event for event in events if isinstance(event, AdapterLoadStarted) and event.tier is Tier.DEVICE]
    assert len(loads) == 1
    assert isinstance(core._policy, FairPolicy)
    tenant = core._policy._tenants["t"]
    assert tenant.counter == 3 * (4 * PROMPT_PRICE + 8 * OUTPUT_PRICE) + 6 * BLOCK


def test_a_tenant_of_cold_adapters_saves_up_a_bounded_claim():
    made = fair(fair_burst_s=4.0)
    cold = sequence(0, adapter=version("k"), tenant="cold")
    made.add(cold, 0.0)
    waiting = deque(sequence(index, num_prompt=200, tenant="hot") for index in range(1, 20))
    for one in waiting:
        made.add(one, 0.0)
    for now in range(20):
        made.begin(float(now))
        num = 0
        while num < 1 and (one := made.offer()) is not None:
            is_cold = one is cold
            if not is_cold:
                one.admitted(0.0, shared=(), pages=())
                waiting.remove(one)
                num += 1
            made.report(one, Outcome.ADAPTER_LOADING if is_cold else Outcome.ADMITTED)
    counters = {name: tenant.counter for name, tenant in made._tenants.items()}
    assert counters["hot"] == 19 * 200
    assert counters["hot"] - counters["cold"] == (4 + 1) * 200, "one was admitted in each second"


def test_a_request_without_room_for_its_kv_is_passed_by_no_other_tenant():
    made = fair()
    made.add(sequence(0, tenant="large"), 0.0)
    made.add(sequence(1, tenant="small"), 0.0)
    made.begin(0.0)
    one = made.offer()
    assert one is not None and one is made.first_in_line and one.seq_id == 0
    made.report(one, Outcome.NO_PAGES)
    assert made.offer() is None and made.first_in_line is one


@pytest.mark.parametrize(("num_tenants", "num_squashed"), [(1, 1), (3, 0)])
def test_a_tenant_below_its_share_takes_a_seat_of_one_beyond_its_own(num_tenants, num_squashed):
    """Where each running sequence is of another tenant, none has one too many."""
    asks = [(0.0, Ask(f"t{index % num_tenants}", 4, 24)) for index in range(12 if num_tenants == 1 else 3)]
    events = run([*asks, (0.05, Ask("light", 4, 4))], num_pages=40, seats=3)
    squashed = [event for event in events if isinstance(event, RequestSquashed)]
    assert len(squashed) == num_squashed
    admitted = [event.request_id for event in events if isinstance(event, RequestAdmitted)]
    assert admitted[3].startswith("light")
    assert sum(isinstance(event, RequestFinished) for event in events) == len(asks) + 1


def test_prompts_of_a_tenant_beyond_its_share_are_spread_while_another_may_come():
    made = fair(max_num_seqs=8, fair_burst_s=5.0)
    made.add(sequence(0, num_prompt=400, tenant="light"), 0.0)
    for index in range(1, 9):
        made.add(sequence(index, num_prompt=400, tenant="flood"), 0.0)
    made.squash(0.0)
    assert order_of(made, 4) == ["light", "flood", "flood", "flood"]
    light, *flood = (one.sequence for one in made._running.values())
    made.squash(0.1)
    assert made.prompts([*flood, light])[0] is light
    assert [made.chunk(one) for one in (light, flood[0])] == [400, LEAST_CHUNK], "beside a prompt of another"
    made.finish(light, 0.2)
    made.squash(0.2)
    asked = made.prompts(flood)
    assert sum(map(made.chunk, asked)) == 3 * 400 // SPREAD_OVER
    made.squash(6.0)
    assert made.prompts(flood) == flood and list(map(made.chunk, flood)) == [400] * 3, "none has come since"


def test_a_small_prompt_is_not_spread():
    made = fair(max_num_seqs=8)
    made.add(sequence(0, num_prompt=10, tenant="light"), 0.0)
    for index in range(1, 9):
        made.add(sequence(index, num_prompt=LEAST_SPREAD, tenant="flood"), 0.0)
    made.squash(0.0)
    assert order_of(made, 3) == ["light", "flood", "flood"]
    _, _, last = (one.sequence for one in made._running.values())
    assert made.chunk(last) == LEAST_SPREAD


@pytest.mark.parametrize(("comes", "num_admitted"), [(True, 61), (False, 64)])
def test_a_tenant_beyond_its_share_leaves_a_seat_while_another_may_come(comes, num_admitted):
    made = fair(max_num_seqs=64)
    if comes:
        made.add(sequence(0, tenant="light"), 0.0)
        assert order_of(made, 1) == ["light"]
    for index in range(1, 100):
        made.add(sequence(index, tenant="flood"), 1.0)
    made.squash(1.0)
    assert Counter(order_of(made, 64, 1.0))["flood"] == num_admitted


def test_a_tenant_with_a_claim_has_more_than_its_share_of_the_seats_and_nobody_takes_them_back():
    """It asked for little, then for all seats at once: no place is taken in turns, for whatever is taken is lost."""
    asks = [(0.0, Ask("flood", 4, 24)) for _ in range(200)]
    asks += [(1.0 + 2 * index, Ask("light", 4, 4)) for index in range(4)]
    asks += [(9.0, Ask("light", 4, 24)) for _ in range(5)]
    events = run(asks, num_pages=80, seats=6)
    squashed = Counter(event.request_id.split("/")[0] for event in events if isinstance(event, RequestSquashed))
    assert squashed["light"] == 0 and 4 <= squashed["flood"] <= 12
    waited = {
        event.request_id: event.waited_s
        for event in events
        if isinstance(event, RequestAdmitted) and event.request_id.startswith("light")
    }
    assert len(waited) == 9 and max(waited.values()) < 0.2, "a step or two"


def test_the_sequence_with_the_fewest_tokens_gives_up_its_place():
    made = fair(max_num_seqs=3)
    flood = [sequence(index, tenant="flood") for index in range(6)]
    for one in flood:
        made.add(one, 0.0)
    order_of(made, 3)
    for one, num_computed in zip(flood, (9, 5, 7), strict=False):
        one.num_computed = num_computed
    made.add(sequence(6, tenant="light"), 1.0)
    assert made.squash(1.0) == [flood[1]]


@pytest.mark.parametrize(("num_before", "num_squashed"), [(0, 0), (40, 1)])
def test_a_tenant_that_is_owed_takes_a_seat_of_one_that_is_not_beyond_its_share(num_before, num_squashed):
    made = fair(max_num_seqs=5, fair_burst_s=100.0)
    for index in range(num_before):
        one = sequence(100 + index, num_prompt=100, tenant="flood")
        made.add(one, 0.0)
        order_of(made, 1)
        made.finish(one, 0.0)
    for index in range(5):
        made.add(sequence(index, tenant=("flood", "light")[index % 2]), 1.0)
    assert Counter(order_of(made, 5, 1.0)) == {"flood": 3, "light": 2}
    made.add(sequence(5, tenant="light"), 1.0)
    assert [one.request.tenant for one in made.squash(1.0)] == ["flood"] * num_squashed


def test_tenants_with_a_claim_take_turns():
    """Of two that are behind a flood, the one that came first goes first, also if it was served before."""
    made = fair(fair_burst_s=100.0)
    for index in range(40):
        made.add(sequence(index, num_prompt=100, tenant="flood"), 0.0)
    order_of(made, 20, 0.0)
    for index in range(3):
        made.add(sequence(100 + index, num_prompt=10, tenant="once"), 1.0)
    assert order_of(made, 1, 1.0) == ["once"]
    for index in range(3):
        made.add(sequence(200 + index, num_prompt=10, tenant="new"), 2.0)
    assert order_of(made, 5, 2.0) == ["once", "new", "once", "new", "new"]


def test_prefetching_looks_at_the_tenants_in_turn():
    made = fair()
    for index in range(50):
        made.add(sequence(index, tenant="flood"), 0.0)
    for index in range(50, 53):
        made.add(sequence(index, tenant=f"t{index}"), 0.0)
    assert {one.request.tenant for one in made.upcoming(4)} == {"flood", "t50", "t51", "t52"}
    assert len(made.upcoming(10)) == 10


def test_wrong_options_and_tenants_are_refused():
    with pytest.raises(ConfigError, match="fair_within = 'fair', expected another policy"):
        fair(fair_within="fair")
    with pytest.raises(ConfigError, match="Got policy = 'nonsense', expected one of"):
        fair(fair_within="nonsense")
    core = engine([], num_pages=22, seats=1)
    for ask, weight in ((Ask("t" * 129, 4, 4), 1.0), (Ask("t", 4, 4, weight=0.0), 0.0)):
        with pytest.raises(RequestError, match=f"tenant of {len(ask.tenant)} characters and weight {weight:g}"):
            core.add_request(ask.request(0), 0.0)
