"""The number of replicas: forecasts, capacity, decisions, and simulated fleets that start and drain."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.costs.step_model import PRIOR
from manylora.core.errors import ConfigError
from manylora.core.routing import ReplicaReport, ReplicaView
from manylora.core.routing.policies import RandomRouter
from manylora.core.routing.view import Sent
from manylora.core.scaling.autoscaler import Autoscaler, ScalingPolicy
from manylora.core.scaling.capacity import ReplicaCapacity, predict_capacity
from manylora.core.scaling.controller import ReplicaPhase, ScalingController
from manylora.core.scaling.forecast import RateForecast
from manylora.core.scaling.watch import FleetLoad, LoadWatch, WatchedDispatcher
from manylora.core.types import Request
from manylora.lab.sim.run.scaling import SimulatedScaling
from manylora.lab.sim.run.simulation import Run, simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

POLICY = ScalingPolicy(min_replicas=1, max_replicas=8, capacity_rps=4.0, utilization=0.75, start_s=10.0)


def load(num_arrivals: float, *, waiting: int = 0, judged: int = 0, kept: int = 0) -> FleetLoad:
    return FleetLoad(num_arrivals=int(num_arrivals), num_waiting=waiting, num_judged=judged, num_kept=kept)


def wanted(policy: ScalingPolicy, rates: list[float], present: int = 1) -> list[int]:
    """Return the decisions of a fleet that follows them at once, at one look a second."""
    scaler, arrivals, found = Autoscaler(policy), 0.0, []
    for now, rate in enumerate(rates):
        arrivals += rate
        decision = scaler.decide(float(now), load(arrivals), num_serving=present, num_starting=0)
        present = decision.num_wanted
        found.append(present)
    return found


def test_a_ramp_is_forecast_to_its_height_at_the_end_of_a_start() -> None:
    forecast = RateForecast(memory_s=20, quantile=0.8, recent_s=5)
    arrivals = 0.0
    for now in range(200):
        arrivals += now / 2
        forecast.look(float(now), int(arrivals))
        ahead = forecast.ahead(10.0)
    assert ahead == pytest.approx(199 / 2 + 5, rel=0.05)
    assert forecast.rate < 199 / 2


def test_replicas_start_before_they_are_needed_and_stay_for_several_starts() -> None:
    ramp = [1.0] * 60 + [1.0 + at / 5 for at in range(60)]
    rising = wanted(POLICY, ramp)
    safe = 4.0 * 0.75
    assert rising[59] == 1
    for now in range(85, 110):  # once the slope is known, each rate has its replicas a start ahead
        assert rising[now] * safe >= min(24.0, ramp[now + 10])
    falling = wanted(POLICY, [14.0] * 60 + [0.5] * 60, present=5)
    dropped = falling.index(next(one for one in falling[60:] if one < falling[59]))
    assert dropped >= 60 + POLICY.stay_starts * POLICY.start_s - 1
    assert falling[-1] == 1


def test_a_rate_at_the_edge_does_not_flap() -> None:
    rng = Random(1)
    edge = [6.0 + rng.uniform(-1.5, 1.5) for _ in range(600)]
    found = wanted(POLICY, edge, present=2)[60:]
    changes = sum(one != other for one, other in pairwise(found))
    assert changes <= 4


def test_nothing_is_given_up_while_the_rate_rises() -> None:
    valley = [12.0] * 60 + [3.0] * 18 + [3.0 + second for second in range(12)] + [12.0] * 20
    found = wanted(POLICY, valley)
    assert all(later >= earlier for earlier, later in pairwise(found[82:]))
    assert min(wanted(POLICY, [12.0] * 60 + [3.0] * 60)) == found[0] == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 200), min_size=1, max_size=80), st.integers(1, 3), st.integers(3, 9))
def test_decisions_keep_their_bounds_and_downs_wait_for_the_stay(rates: list[float], least: int, most: int) -> None:
    policy = replace(POLICY, min_replicas=least, max_replicas=most)
    found = wanted(policy, rates, present=least)
    assert all(least <= one <= most for one in found)
    ups = [now for now, (one, other) in enumerate(zip([least, *found], found, strict=False)) if other > one]
    downs = [now for now, (one, other) in enumerate(zip([least, *found], found, strict=False)) if other < one]
    for down in downs:
        assert not any(down - POLICY.start_s < up <= down for up in ups)


def test_a_queue_asks_for_replicas_at_any_rate() -> None:
    scaler = Autoscaler(POLICY)
    for now in range(20):
        decision = scaler.decide(float(now), load(now), num_serving=1, num_starting=0)
    assert decision.num_wanted == 1
    decision = scaler.decide(20.0, load(20, waiting=100), num_serving=1, num_starting=0)
    assert decision.num_wanted >= 4


def test_a_queue_tells_the_rate_of_a_replica_before_its_steps_are_fitted() -> None:
    scaler = Autoscaler(replace(POLICY, capacity_rps=None))
    found = []
    for now in range(8):  # 9 arrive and 4 are answered in each second
        present = load(9 * now, waiting=5 * now)
        found.append(scaler.decide(float(now), present, num_serving=1, num_starting=0).num_wanted)
    first = next(place for place, wanted in enumerate(found) if wanted > 1)
    assert first <= 6 and found[first] >= 3  # 9 and a queue, by three quarters of 4


def test_a_replica_that_answers_nothing_is_given_the_time_of_a_start() -> None:
    scaler = Autoscaler(replace(POLICY, capacity_rps=None))
    found = [
        scaler.decide(float(now), load(9 * now, waiting=9 * now), num_serving=1, num_starting=0).num_wanted
        for now in range(16)
    ]
    assert found[:10] == [1] * 10 and found[-1] == POLICY.max_replicas


@pytest.mark.parametrize("capacity_rps", [16.0, 40.0, 400.0])
def test_a_queue_that_stays_corrects_a_capacity_that_is_far_too_high(capacity_rps: float) -> None:
    """Ten requests a second come, and a replica takes four of them; the capacity is given, or was predicted."""
    scaler = Autoscaler(replace(POLICY, capacity_rps=capacity_rps))
    present, arrivals, waiting, queues, safe = 1, 0, 0, [], []
    for now in range(600):
        arrivals += 10
        waiting = max(0, waiting + 10 - 4 * present)
        decision = scaler.decide(float(now), load(arrivals, waiting=waiting), num_serving=present, num_starting=0)
        present, safe = decision.num_wanted, [*safe, decision.safe_rate or 0.0]
        queues.append(waiting)
    given = capacity_rps * POLICY.utilization
    assert safe[0] == given
    assert queues.index(0) <= 2 * POLICY.start_s  # three replicas are there as soon as the queue has lasted for a start
    assert max(queues) < 100
    assert given / 10 <= safe[-1] < given / 1.8  # by a tenth each time, and so for the next queue


@pytest.mark.parametrize("start_s", [10.0, 1.0])
def test_a_short_queue_says_nothing_about_a_capacity(start_s: float) -> None:
    """A replica that is held up by cold adapters for a while may be as fast as ever behind them."""
    scaler = Autoscaler(replace(POLICY, start_s=start_s))
    found = []
    for now in range(60):
        waiting = 20 + now if 30 <= now < 38 else 0
        found.append(scaler.decide(float(now), load(2 * now, waiting=waiting), num_serving=8, num_starting=0).safe_rate)
    assert found == [3.0] * 60


def test_capacity_is_corrected_by_contradictions_alone() -> None:
    capacity = ReplicaCapacity(utilization=0.5, goal=0.99)
    assert capacity.safe_rate is None
    capacity.predict(8.0)
    assert capacity.safe_rate == 4.0
    capacity.learn(3.0, 100, 100)  # kept below it, broken above it: as expected
    capacity.learn(6.0, 100, 50)
    capacity.learn(3.0, 10, 0)  # too few
    capacity.contradict(4.0)  # a queue at the rate that it should take
    assert capacity.safe_rate == 4.0
    capacity.learn(3.9, 100, 90)
    assert capacity.safe_rate == pytest.approx(4.0 * 0.95 * 3.9 / 4.0)
    before = capacity.safe_rate
    capacity.learn(40.0, 100, 100)
    assert before is not None and before < capacity.safe_rate < 1.2 * before
    given_rate = ReplicaCapacity(utilization=0.5, goal=0.99, rate=2.0)
    given_rate.predict(8.0)
    assert given_rate.safe_rate == 1.0


def test_predicted_capacity_falls_with_longer_requests_and_less_memory() -> None:
    def capacity(prompt: float = 200, answer: float = 100, kv: int | None = None) -> float:
        return predict_capacity(
            PRIOR, prompt_tokens=prompt, answer_tokens=answer, mean_rank=16, max_num_seqs=64, kv_tokens=kv
        )

    assert capacity(prompt=800) < capacity() > capacity(answer=400)
    assert capacity(kv=2_000) < capacity(kv=20_000) == capacity()


def test_a_replica_that_only_reads_kv_takes_as_many_requests_as_it_can_read() -> None:
    """A request reads its prompt once, and its context with each token of its answer."""
    free = dict.fromkeys(("step_s", "request_s", "rank_s", "prompt_step_s", "token_rank_s"), 0.0)
    steps = replace(PRIOR, **free, token_s=(0.0,) * 4, context_s=1e-6, prompt_context_s=1e-6)  # type: ignore[arg-type]
    for prompt, answer in ((4000, 1), (300, 50), (1, 200)):
        rate = predict_capacity(
            steps, prompt_tokens=prompt, answer_tokens=answer, mean_rank=0, max_num_seqs=64, kv_tokens=None
        )
        assert 1 / rate == pytest.approx(1e-6 * (prompt + answer * (prompt + answer / 2)))


def test_the_watch_judges_requests_that_still_wait_once() -> None:
    watch = LoadWatch(2.0)
    for index in range(4):
        watch.arrived(str(index), 0.0)
    watch.started("0", 1.0)
    watch.ended("1")
    assert watch.load(1.0) == load(4, waiting=2, judged=1, kept=1)
    assert watch.load(3.0) == watch.load(4.0) == load(4, waiting=2, judged=3, kept=1)
    watch.started("2", 5.0)
    watch.started("2", 5.0)
    assert watch.load(5.0) == load(4, waiting=1, judged=3, kept=1)


def test_a_late_request_that_moves_is_late_once() -> None:
    watch = LoadWatch(2.0)
    watch.arrived("a", 0.0)
    assert watch.load(3.0) == load(1, waiting=1, judged=1)
    watch.ended("a")
    watch.moved("a", 3.0)
    assert watch.load(6.0) == load(1, waiting=1, judged=1)
    watch.started("a", 6.5)
    assert watch.load(7.0) == load(1, judged=1)


def test_requests_of_a_lost_replica_are_no_arrivals() -> None:
    """A rate of kills must not look like a rate of requests; those without a first token wait again."""
    watch = LoadWatch(2.0)
    dispatcher = WatchedDispatcher(RandomRouter(Random(0)), 2, {}, watch=watch, now=lambda: 1.0)
    requests = [Request(request_id=str(index), prompt=(1,)) for index in range(4)]
    for one in requests:
        dispatcher.dispatch(one)
    dispatcher.started("0")
    dispatcher.started("1")
    for _ in range(3):
        for index, one in enumerate(requests):
            dispatcher.ended(one.request_id)
            dispatcher.dispatch(one, {1}, 5 if index < 2 else 0)
    assert watch.load(1.0) == load(4, waiting=2, judged=2, kept=2)
    assert dispatcher.views[1].num_prompt_tokens == 4 + 2 * 5


def test_the_least_loaded_is_drained_and_the_hottest_adapters_are_named() -> None:
    views = [ReplicaView() for _ in range(4)]

    def send(replica: int, adapter: str, num: int) -> None:
        for _ in range(num):
            views[replica].add(Sent(replica=replica, adapter=adapter, rank=8, num_prompt_tokens=9))

    send(0, "a", 3)
    send(1, "b", 2)
    send(2, "a", 4)
    policy = replace(POLICY, max_replicas=4, num_warm=2, least_stay_s=0.0, stay_starts=0.0)
    controller = ScalingController(policy, views, LoadWatch(2.0))
    assert controller.hottest_adapters() == ["a", "b"]
    views[0].learn(ReplicaReport(steps=PRIOR))
    phases = [ReplicaPhase.SERVING, ReplicaPhase.SERVING, ReplicaPhase.SERVING, ReplicaPhase.IDLE]
    order = controller.look(0.0, phases)
    assert (order.start, order.drain) == ((), (1, 0))
    watch = LoadWatch(2.0)
    for index in range(400):
        watch.arrived(str(index), 0.0)
    order = ScalingController(policy, views, watch).look(
        0.0, [ReplicaPhase.SERVING, ReplicaPhase.DRAINING, ReplicaPhase.IDLE, ReplicaPhase.IDLE]
    )
    assert (order.start, order.drain) == ((2, 3), ())


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_replicas"):
        ScalingPolicy(min_replicas=3, max_replicas=2)


def scaled(seed: int = 0, num_warm: int = 4) -> Run:
    rng = Random(seed)
    times, now = [], 0.0
    while now < 200:
        now += rng.expovariate(14.0 if 60 <= now < 120 else 1.0)
        times.append(now)
    requests = tuple(
        RequestSpec(arrival_s=at, num_prompt_tokens=400, num_output_tokens=60, adapter=f"a{rng.randrange(6)}")
        for at in times
    )
    workload = Workload(
        name="hill", requests=requests, adapters=tuple(AdapterSpec(name=f"a{index}", rank=16) for index in range(6))
    )
    config = make_config(Setup(model="llama-2-7b", hardware="a10", max_tokens=100, num_replicas=4), seed=seed)
    policy = ScalingPolicy(min_replicas=1, max_replicas=4, start_s=8.0, num_warm=num_warm)
    return simulate(workload, replace(config, scaling=SimulatedScaling(policy=policy, start_s=8.0)))


@pytest.mark.slow
def test_simulated_replicas_follow_a_hill_and_lose_no_request() -> None:
    run = scaled()
    assert all(record.error is None and record.num_output_tokens == 60 for record in run.records)
    assert 3 <= max(decision.num_wanted for _, decision in run.decisions) <= 4
    assert len(run.spans) >= 3
    for span in run.spans:
        assert span.asked_at <= span.serving_at <= span.draining_at and span.ended_at < math.inf
        assert span.draining_at == math.inf or span.draining_at <= span.ended_at
    for record in run.records:  # only while it serves
        lives = [span for span in run.spans if span.index == record.replica]
        assert any(span.serving_at <= record.arrived_at <= span.draining_at for span in lives)
    again = scaled()
    assert [record.ttft_s for record in again.records] == [record.ttft_s for record in run.records]
    assert again.spans == run.spans


@pytest.mark.slow
def test_the_first_requests_of_a_new_replica_find_their_adapters_warm() -> None:
    def cold(run: Run) -> int:
        begins = {span.index: span.serving_at for span in run.spans if span.asked_at > 0}
        return sum(
            record.was_resident is False
            for record in run.records
            if record.replica in begins and 0 <= record.arrived_at - begins[record.replica] < 5
        )

    assert cold(scaled(num_warm=6)) < cold(scaled(num_warm=0))
