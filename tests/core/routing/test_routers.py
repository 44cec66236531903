"""Routers and their views under random traffic, outages and reports."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.costs.step_model import PRIOR
from manylora.core.routing import ROUTERS, Dispatcher, ReplicaReport, ReplicaView, RouterContext, make_router
from manylora.core.types import Request, SamplingParams

RANKS = {f"a{index}": 8 << index % 4 for index in range(12)}
NUM_REPLICAS = 5

serving = st.none() | st.sets(st.integers(0, NUM_REPLICAS - 1), min_size=1)
arrival = st.tuples(
    st.just("arrive"),
    st.sampled_from([*RANKS, "", "base", "unknown"]),
    st.integers(1, 3000),
    st.none() | st.integers(1, 500),
    serving,
)
reports = st.builds(
    ReplicaReport,
    num_requests=st.none() | st.integers(0, 40),
    kv_tokens=st.none() | st.integers(0, 20_000),
    resident=st.none() | st.lists(st.sampled_from([*RANKS, "elsewhere"]), unique=True),
    steps=st.none() | st.just(PRIOR),
    num_answers=st.integers(0, 1000),
    num_answer_tokens=st.integers(0, 100_000),
)
event = st.one_of(
    arrival,
    st.tuples(st.just("start"), st.integers(0, 200)),
    st.tuples(st.just("end"), st.integers(0, 200)),
    st.tuples(st.just("report"), st.integers(0, NUM_REPLICAS - 1), reports),
    st.tuples(st.just("restart"), st.integers(0, NUM_REPLICAS - 1)),
)


def counts(view: ReplicaView) -> tuple[object, ...]:
    return (
        view.num_requests,
        view.num_prompt_tokens,
        view.num_waiting,
        view.waiting_tokens,
        view.waiting_row_rank,
        view.sum_rank,
        view.max_rank,
        dict(view.ranks),
        dict(view.adapters),
    )


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=40, deadline=None)
@given(events=st.lists(event, max_size=60), tbt_s=st.none() | st.floats(0.001, 1.0))
def test_requests_go_where_they_can_be_served_and_leave_no_trace(name: str, events: list, tbt_s: float | None):
    context = RouterContext(rng=Random(0), base_name="base", max_num_seqs=4, ranks=RANKS)
    given_options = {} if tbt_s is None else {"tbt_s": tbt_s}
    dispatcher = Dispatcher(make_router(name, context, given_options), NUM_REPLICAS, RANKS)
    in_flight: dict[str, int] = {}
    for number, one in enumerate(events):
        match one:
            case ("arrive", model, num_tokens, most, among):
                sampling = SamplingParams(max_tokens=most)
                request = Request(request_id=str(number), prompt=(1,) * num_tokens, model=model, sampling=sampling)
                replica = dispatcher.dispatch(request, among)
                assert replica in (range(NUM_REPLICAS) if among is None else among)
                if model in RANKS:
                    assert model in dispatcher.views[replica].resident
                in_flight[str(number)] = replica
            case ("start", place) if in_flight:
                dispatcher.started(list(in_flight)[place % len(in_flight)])
            case ("end", place) if in_flight:
                request_id = list(in_flight)[place % len(in_flight)]
                assert dispatcher.ended(request_id) == in_flight.pop(request_id)
            case ("report", replica, report):
                dispatcher.report(replica, report)
            case ("restart", replica):
                dispatcher.restarted(replica)
        assert sum(view.num_requests for view in dispatcher.views) == len(in_flight)
        assert all(view.max_rank == max(view.ranks, default=0) for view in dispatcher.views)
        assert all(view.mean_answer_tokens >= 0 for view in dispatcher.views)
    for request_id in in_flight:
        dispatcher.ended(request_id)
    assert all(counts(view) == counts(ReplicaView()) for view in dispatcher.views)
