"""Adapters dealt out to replicas in order of rank."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.routing import Dispatcher
from manylora.core.routing.rank_placement import PERIOD, RankPlacementRouter, deal
from manylora.core.types import Request

costs = st.lists(st.tuples(st.sampled_from([8, 16, 64]), st.floats(0.001, 1000.0)), min_size=1, max_size=40)


@given(costs, st.sets(st.integers(0, 20), min_size=1, max_size=8))
def test_every_replica_gets_its_share_of_the_time_and_a_run_of_ranks(drawn, replicas):
    among = sorted(replicas)
    found = sorted(((rank, f"a{index}", cost) for index, (rank, cost) in enumerate(drawn)), reverse=True)
    parts = deal(found, among)
    total: dict[int, float] = dict.fromkeys(among, 0.0)
    ranks: list[tuple[int, int]] = []  # replica, rank
    for rank, name, cost in found:
        ends = [end for _, end in parts[name]]
        assert ends == sorted(ends) and ends[-1] == 1.0
        begin = 0.0
        for replica, end in parts[name]:
            total[replica] += cost * (end - begin)
            ranks.append((replica, -rank))
            begin = end
    share = sum(cost for _, _, cost in found) / len(among)
    assert all(time_s == pytest.approx(share, rel=1e-6) for time_s in total.values())
    assert ranks == sorted(ranks), "a later replica has no larger rank"


def traffic(ranks: dict[str, int], num: int, num_replicas: int, serving: set[int] | None = None) -> list[set[int]]:
    """Return the ranks that each replica was sent, by requests after the first two placements."""
    dispatcher = Dispatcher(RankPlacementRouter(ranks, Random(0)), num_replicas, ranks)
    sent: list[set[int]] = [set() for _ in range(num_replicas)]
    rng = Random(1)
    for index in range(num):
        name = rng.choice(list(ranks))
        request = Request(request_id=str(index), prompt=(1,) * 50, model=name)
        replica = dispatcher.dispatch(request, serving)
        dispatcher.ended(str(index))
        if index > 2 * PERIOD:
            sent[replica].add(ranks[name])
    return sent


def test_replicas_come_to_serve_one_rank_each():
    ranks = {f"small{index}": 8 for index in range(40)} | {f"large{index}": 64 for index in range(40)}
    large, small = traffic(ranks, 6 * PERIOD, 2)
    assert large == {64} and 8 in small, "the first has the large ones; the border may be inside them"


def test_a_replica_that_is_out_is_dealt_nothing():
    ranks = {f"a{index}": 8 << index % 4 for index in range(20)}
    assert traffic(ranks, 3 * PERIOD, 3, {0, 2})[1] == set()


def test_the_base_and_unknown_models_go_to_the_least_loaded():
    dispatcher = Dispatcher(RankPlacementRouter({"a": 8}, Random(0)), 3, {"a": 8})
    chosen = [dispatcher.dispatch(Request(request_id=str(index), prompt=(1,), model="")) for index in range(3)]
    assert chosen == [0, 1, 2]
