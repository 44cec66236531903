"""Which replica serves a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from manylora.errors import ConfigError
from manylora.routing import ROUTERS, AffinityRouter, Dispatcher, ReplicaLoad, Router, RouterContext, StepModel
from manylora.routing import make_router as make_router_of
from manylora.types import Request

STEPS = StepModel(
    step_s=0.02,
    request_s=0.0001,
    rank_s=0.00001,
    prompt_token_s=0.0001,
    prompt_token_rank_s=0.0,
    is_padded=True,
)


def make_router(name: str, rng: Random, options: dict[str, object] | None = None, **context: object) -> Router:
    settings = {"steps": STEPS, "max_num_seqs": 30} | context
    return make_router_of(name, RouterContext(rng=rng, **settings), options)  # type: ignore[arg-type]


def request(index: int, model: str = "") -> Request:
    return Request(request_id=str(index), prompt=(1,) * (index % 7 + 1), model=model)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_chooses_a_replica_that_exists_and_the_same_one_again(name: str):
    def choices() -> list[int]:
        dispatcher = Dispatcher(make_router(name, Random(3)), 4)
        return [dispatcher.dispatch(request(index, f"a{index % 9}")) for index in range(100)]

    assert choices() == choices()
    assert set(choices()) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ROUTERS)
def test_one_replica_gets_everything(name: str):
    dispatcher = Dispatcher(make_router(name, Random(0)), 1)
    assert [dispatcher.dispatch(request(index, "a")) for index in range(40)] == [0] * 40


def test_the_least_loaded_gets_the_next():
    router = make_router("least-loaded", Random(0))
    assert router.choose(request(0), [ReplicaLoad(2, 9), ReplicaLoad(1, 9), ReplicaLoad(1, 8)]) == 2


def test_two_choices_are_far_more_even_than_one():
    def spread(name: str) -> int:
        dispatcher = Dispatcher(make_router(name, Random(1)), 20)
        for index in range(2000):
            dispatcher.dispatch(request(index))
        loads = [load.num_requests for load in dispatcher.loads]
        return max(loads) - min(loads)

    assert spread("power-of-two") <= 6 < spread("random") / 3


def test_an_adapter_stays_where_it_is_while_load_allows():
    dispatcher = Dispatcher(make_router("affinity", Random(0)), 5)
    homes: dict[str, set[int]] = {}
    for index in range(200):
        adapter = f"a{index % 40}"
        homes.setdefault(adapter, set()).add(dispatcher.dispatch(request(index, adapter)))
        dispatcher.ended(str(index))
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len({next(iter(replicas)) for replicas in homes.values()}) == 5


def test_a_popular_adapter_spills_over_within_the_bound():
    dispatcher = Dispatcher(AffinityRouter(overload=1.25), 4)
    sent = Counter(dispatcher.dispatch(request(index, "popular")) for index in range(100))
    assert max(sent.values()) <= 1.25 * 100 / 4 + 1
    assert len(sent) == 4


def test_another_replica_moves_only_what_goes_to_it():
    router = AffinityRouter()
    idle = [ReplicaLoad() for _ in range(6)]
    before = {f"a{i}": router.choose(request(0, f"a{i}"), idle[:5]) for i in range(300)}
    after = {f"a{i}": router.choose(request(0, f"a{i}"), idle) for i in range(300)}
    moved = [name for name in before if before[name] != after[name]]
    assert all(after[name] == 5 for name in moved)
    assert 20 <= len(moved) <= 85  # a sixth of them, more or less


@pytest.mark.parametrize("name", ROUTERS)
def test_a_replica_that_is_out_gets_nothing(name: str):
    dispatcher = Dispatcher(make_router(name, Random(0)), 4)
    assert {dispatcher.dispatch(request(index, f"a{index}"), {0, 3}) for index in range(60)} == {0, 3}


def test_an_outage_moves_only_what_the_replica_had():
    def homes(serving: set[int]) -> dict[str, int]:
        dispatcher = Dispatcher(make_router("affinity", Random(0)), 4)
        found = {}
        for index in range(40):
            found[f"a{index}"] = dispatcher.dispatch(request(index, f"a{index}"), serving)
            dispatcher.ended(str(index))
        return found

    before, after = homes({0, 1, 2, 3}), homes({0, 2, 3})
    assert all(after[name] == home for name, home in before.items() if home != 1)
    assert 1 not in after.values()


def test_requests_for_the_base_go_where_load_is_least():
    router = make_router("affinity", Random(0), base_name="base")
    assert router.choose(request(0, "base"), [ReplicaLoad(1), ReplicaLoad(0), ReplicaLoad(1)]) == 1


def test_an_end_is_counted_where_the_request_was_sent():
    dispatcher = Dispatcher(make_router("least-loaded", Random(0)), 2)
    first, second = dispatcher.dispatch(request(0)), dispatcher.dispatch(request(1))
    assert {first, second} == {0, 1}
    assert dispatcher.ended("0") == first
    assert dispatcher.loads[first] == ReplicaLoad()
    assert dispatcher.loads[second].num_requests == 1


def loaded(*ranks: int) -> ReplicaLoad:
    """Return a replica where requests of these ranks are under way."""
    load = ReplicaLoad()
    for rank in ranks:
        load.add(10, rank)
    return load


@pytest.mark.parametrize(("is_padded", "replica"), [(True, 1), (False, 0)])
def test_a_large_rank_goes_where_it_slows_others_down_least(is_padded: bool, replica: int):
    """Many small ranks here, more large ones there: the kernels decide who would feel another large one less."""
    router = make_router("rank-aware", Random(0), steps=replace(STEPS, is_padded=is_padded), ranks={"large": 64})
    assert router.choose(request(0, "large"), [loaded(*[8] * 20), loaded(*[64] * 22)]) == replica


def test_a_replica_that_would_miss_the_slo_comes_last():
    router = make_router("rank-aware", Random(0), {"tbt_s": 0.03}, ranks={"large": 64})
    # Padded, 20 requests beside rank 64 take 0.02 + 0.0021 + 21 x 64 x 0.00001 = 0.036 s a step; 8 take 0.027 s.
    assert router.choose(request(0, "large"), [loaded(*[64] * 20), loaded(*[8] * 8)]) == 1


def test_ranks_are_counted_while_requests_are_under_way():
    dispatcher = Dispatcher(make_router("least-loaded", Random(0)), 1, {"a": 8, "b": 64})
    for index, model in enumerate(("a", "b", "")):
        dispatcher.dispatch(request(index, model))
    (load,) = dispatcher.loads
    assert (load.sum_rank, load.max_rank) == (72, 64)
    dispatcher.ended("1")
    assert (load.sum_rank, load.max_rank, dict(load.ranks)) == (8, 8, {8: 1, 0: 1})


def test_first_fit_fills_one_replica_after_the_other():
    dispatcher = Dispatcher(make_router("first-fit", Random(0), max_num_seqs=2), 3)
    assert [dispatcher.dispatch(request(index)) for index in range(8)] == [0, 0, 1, 1, 2, 2, 0, 1]


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match=r"'nearest'.*affinity"):
        make_router("nearest", Random(0))
    with pytest.raises(ConfigError, match="needs the cost of steps"):
        make_router("rank-aware", Random(0), steps=None)
    with pytest.raises(ConfigError, match="overload"):
        AffinityRouter(overload=1.0)
