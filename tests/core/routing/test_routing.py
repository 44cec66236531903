"""Which replica serves a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from manylora.core.costs.step_model import PRIOR, StepModel
from manylora.core.errors import ConfigError
from manylora.core.routing import ROUTERS, Dispatcher, FallbackRouter, ReplicaReport, ReplicaView, Router, RouterContext
from manylora.core.routing import make_router as make_router_of
from manylora.core.routing.policies import AffinityRouter
from manylora.core.routing.view import Sent
from manylora.core.types import Request

STEPS = replace(PRIOR, step_s=0.02, request_s=0.0001, context_s=0.0, rank_s=0.00001, is_padded=True, token_rank_s=0.0)


RANKS = {f"a{index}": 8 << index % 4 for index in range(300)} | {"popular": 16, "a": 8}


def replica(*ranks: int, adapter: str | None = None, steps: StepModel = STEPS) -> ReplicaView:
    """Return a replica where requests of these ranks are under way, each past its prompt of ten tokens."""
    view = ReplicaView()
    view.learn(ReplicaReport(steps=steps))
    for rank in ranks:
        sent = Sent(replica=0, adapter=adapter, rank=rank, num_prompt_tokens=10)
        view.add(sent)
        view.start(sent)
    return view


def chosen(router: Router, model: str, replicas: list[ReplicaView], among: list[int] | None = None) -> int:
    return router.choose(request(0, model), replicas, range(len(replicas)) if among is None else among)


def make_router(name: str, rng: Random, options: dict[str, object] | None = None, **context: object) -> Router:
    settings = {"max_num_seqs": 30, "ranks": RANKS} | context
    return make_router_of(name, RouterContext(rng=rng, **settings), options)  # type: ignore[arg-type]


def request(index: int, model: str = "") -> Request:
    return Request(request_id=str(index), prompt=(1,) * (index % 7 + 1), model=model)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_chooses_a_replica_that_exists_and_the_same_one_again(name: str):
    def choices() -> list[int]:
        dispatcher = Dispatcher(make_router(name, Random(3)), 4, RANKS)
        return [dispatcher.dispatch(request(index, f"a{index % 9}")) for index in range(100)]

    assert choices() == choices()
    assert set(choices()) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ROUTERS)
def test_one_replica_gets_everything(name: str):
    dispatcher = Dispatcher(make_router(name, Random(0)), 1)
    assert [dispatcher.dispatch(request(index, "a")) for index in range(40)] == [0] * 40


def test_the_least_loaded_gets_the_next():
    router = make_router("least-loaded", Random(0))
    assert chosen(router, "", [replica(0, 0), replica(0, 0, 0), replica(0)]) == 2


def test_two_choices_are_far_more_even_than_one():
    def spread(name: str) -> int:
        dispatcher = Dispatcher(make_router(name, Random(1)), 20)
        for index in range(2000):
            dispatcher.dispatch(request(index))
        loads = [view.num_requests for view in dispatcher.views]
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
    dispatcher = Dispatcher(AffinityRouter(), 4)
    sent = Counter(dispatcher.dispatch(request(index, "popular")) for index in range(100))
    assert max(sent.values()) <= 1.25 * 100 / 4 + 1
    assert len(sent) == 4


def test_another_replica_moves_only_what_goes_to_it():
    router = AffinityRouter()
    idle = [ReplicaView() for _ in range(6)]
    before = {f"a{i}": chosen(router, f"a{i}", idle[:5]) for i in range(300)}
    after = {f"a{i}": chosen(router, f"a{i}", idle) for i in range(300)}
    moved = [name for name in before if before[name] != after[name]]
    assert all(after[name] == 5 for name in moved)
    assert 20 <= len(moved) <= 85  # a sixth of them, more or less


@pytest.mark.parametrize("name", ROUTERS)
def test_a_replica_that_is_out_gets_nothing(name: str):
    dispatcher = Dispatcher(make_router(name, Random(0)), 4)
    assert {dispatcher.dispatch(request(index, f"a{index}"), {0, 3}) for index in range(60)} == {0, 3}


def test_a_router_that_fails_is_replaced_by_the_least_loaded(caplog: pytest.LogCaptureFixture):
    class Broken:
        def choose(self, request: Request, replicas: Sequence[ReplicaView], among: Sequence[int]) -> int:
            answer = (2, 1, 7, 0.0, None, True)[len(request.prompt) - 1 if request.model else 0]
            if request.model == "a":
                raise KeyError(request.model)
            return answer  # type: ignore[return-value]

    dispatcher = Dispatcher(FallbackRouter(Broken()), 3, RANKS)
    assert [dispatcher.dispatch(request(0), {0, 2}) for _ in range(2)] == [2, 2]
    with caplog.at_level("ERROR"):
        sent = [dispatcher.dispatch(request(index, "a"), {0, 1}) for index in range(6)]
        sent += [dispatcher.dispatch(request(index, "b"), {0, 2}) for index in range(6)]
    assert sent[:6] == [0, 1, 0, 1, 0, 1]
    assert set(sent[6:]) == {0, 2}
    assert [record.args[0] for record in caplog.records] == [1, 2, 4, 8]  # type: ignore[index]


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
    assert chosen(router, "base", [replica(0), replica(), replica(0)]) == 1


def test_an_end_is_counted_where_the_request_was_sent():
    dispatcher = Dispatcher(make_router("least-loaded", Random(0)), 2)
    first, second = dispatcher.dispatch(request(0)), dispatcher.dispatch(request(1))
    assert {first, second} == {0, 1}
    assert dispatcher.ended("0") == first
    assert dispatcher.views[first].num_requests == 0
    assert dispatcher.views[second].num_requests == 1


@pytest.mark.parametrize(("is_padded", "best"), [(True, 1), (False, 0)])
def test_a_large_rank_goes_where_it_slows_others_down_least(is_padded: bool, best: int):
    """Many small ranks here, more large ones there: the kernels decide who would feel another large one less."""
    router = make_router("rank-aware", Random(0), ranks={"large": 64})
    steps = replace(STEPS, is_padded=is_padded)
    assert chosen(router, "large", [replica(*[8] * 20, steps=steps), replica(*[64] * 22, steps=steps)]) == best


def test_a_replica_that_would_miss_the_slo_comes_last():
    router = make_router("rank-aware", Random(0), {"tbt_s": 0.03}, ranks={"large": 64})
    # Padded, 20 requests beside rank 64 take 0.02 + 0.0021 + 21 x 64 x 0.00001 = 0.036 s a step; 8 take 0.027 s.
    assert chosen(router, "large", [replica(*[64] * 20), replica(*[8] * 8)]) == 1


def test_a_view_counts_ranks_prompts_and_adapters_while_requests_are_under_way():
    dispatcher = Dispatcher(make_router("least-loaded", Random(0)), 1, {"a": 8, "b": 64})
    for index, model in enumerate(("a", "b", "", "unknown")):
        dispatcher.dispatch(request(index, model))
    (view,) = dispatcher.views
    assert (view.sum_rank, view.max_rank, view.num_adapted) == (72, 64, 2)
    assert (view.num_prompt_tokens, view.waiting_tokens, view.waiting_row_rank) == (10, 10, 1 * 8 + 2 * 64)
    assert list(view.resident) == ["a", "b"]  # names that no replica knows take no room
    dispatcher.started("1")
    dispatcher.started("1")
    assert (view.num_waiting, view.waiting_tokens, view.waiting_row_rank) == (3, 8, 8)
    dispatcher.ended("1")
    assert (view.sum_rank, view.max_rank, dict(view.ranks), dict(view.adapters)) == (8, 8, {8: 1, 0: 2}, {"a": 1})


def test_reports_correct_the_view():
    dispatcher = Dispatcher(make_router("least-loaded", Random(0)), 2, {"a": 8, "b": 64})
    for index in range(4):
        dispatcher.dispatch(request(index, "a"))
    view, other = dispatcher.views
    dispatcher.ended("0")
    # Four requests were there a moment ago, so two of six are those of another router; "a" is on its way.
    dispatcher.report(0, ReplicaReport(num_requests=2 + 2, kv_tokens=99, resident=["b", "c"], steps=STEPS))
    assert view.num_foreign == 2
    assert (view.load, view.kv_tokens, set(view.resident)) == (view.num_requests + 2, 99, {"a", "b", "c"})
    assert view.steps == STEPS == other.steps  # one that has not reported is taken to be as fast
    slower = replace(STEPS, step_s=0.1)
    dispatcher.report(1, ReplicaReport(steps=slower))
    assert (view.steps, other.steps) == (STEPS, slower)
    dispatcher.restarted(0)
    assert set(view.resident) == {"a"}


def test_the_length_of_answers_is_learnt_from_reports():
    dispatcher = Dispatcher(make_router("least-loaded", Random(0)), 2)
    dispatcher.report(0, ReplicaReport(num_answers=400, num_answer_tokens=400 * 60))
    assert dispatcher.views[1].mean_answer_tokens == pytest.approx(61, abs=1)
    dispatcher.report(0, ReplicaReport(num_answers=2, num_answer_tokens=900))  # it began again
    dispatcher.report(0, ReplicaReport(num_answers=3002, num_answer_tokens=900 + 3000 * 90))
    assert 75 < dispatcher.views[0].mean_answer_tokens < 90


class Counting:
    """A router that counts its questions and keeps a state."""

    def __init__(self) -> None:
        self.asked = 0

    def choose(self, request: Request, replicas: object, among: list[int]) -> int:
        self.asked += 1
        return among[self.asked % len(among)]


def test_a_router_is_asked_once_also_in_an_outage():
    router = Counting()
    dispatcher = Dispatcher(router, 3)
    assert [dispatcher.dispatch(request(index), {0, 2}) for index in range(4)] == [2, 0, 2, 0]
    assert router.asked == 4


def test_auto_keeps_an_adapter_where_it_is_until_that_costs_more_than_a_copy():
    router = make_router("auto", Random(0), ranks={"a": 8})
    busy = [replica(8), replica(), replica()]
    busy[0].resident["a"] = None
    assert chosen(router, "a", busy) == 0
    busy[0] = replica(*[8] * 20, adapter="a")
    assert chosen(router, "a", busy) != 0


def test_auto_places_an_adapter_that_is_nowhere_by_load_and_among_equals_by_its_name():
    router = make_router("auto", Random(0))
    idle = [replica() for _ in range(6)]
    homes = {chosen(router, f"a{index}", idle) for index in range(60)}
    assert homes == set(range(6))
    assert chosen(router, "a1", [replica(8), replica(8), replica(), replica(8)]) == 2


def test_auto_leaves_a_replica_that_would_miss_the_slo():
    router = make_router("auto", Random(0), {"tbt_s": 0.03}, ranks={"large": 64})
    full = replica(*[64] * 20)
    full.resident["large"] = None
    assert chosen(router, "large", [full, replica(*[8] * 8)]) == 1


def test_auto_leaves_a_replica_without_memory_or_seats():
    router = make_router("auto", Random(0), max_num_seqs=4)
    short, roomy = replica(8, adapter="a"), replica(8, 8, 8)
    short.kv_tokens = 100
    assert chosen(router, "a", [short, roomy]) == 1
    assert chosen(router, "a", [replica(*[8] * 30, adapter="a"), roomy]) == 1


def test_auto_gives_a_hot_adapter_copies_and_asks_fewer_of_them_when_its_load_falls():
    dispatcher = Dispatcher(make_router("auto", Random(0)), 6, RANKS)
    for index in range(60):
        dispatcher.dispatch(request(index, "popular"))
    spread = [view.num_requests for view in dispatcher.views]
    assert min(spread) > 0
    for index in range(60):
        dispatcher.ended(str(index))
    used = set()
    for index in range(60):
        used.add(dispatcher.dispatch(request(index, "popular")))
        dispatcher.ended(str(index))
    assert len(used) == 1


def test_first_fit_fills_one_replica_after_the_other():
    dispatcher = Dispatcher(make_router("first-fit", Random(0), max_num_seqs=2), 3)
    assert [dispatcher.dispatch(request(index)) for index in range(8)] == [0, 0, 1, 1, 2, 2, 0, 1]


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match=r"'nearest'.*affinity"):
        make_router("nearest", Random(0))
    with pytest.raises(ConfigError, match="tbt_s"):
        make_router("auto", Random(0), {"tbt_s": -1.0})
