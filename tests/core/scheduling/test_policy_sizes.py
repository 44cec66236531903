"""Request sizes, clustering and quotas: formulas against hand-worked cases, clustering against brute force."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.scheduling.policies.chameleon.clustering import choose, cluster, cut_offs
from manylora.core.scheduling.policies.chameleon.queue_plan import QueuePlan, RequestHistory, plan_queues, plan_static
from manylora.core.scheduling.policies.chameleon.quota import (
    QueueLoad,
    QuotaLedger,
    in_proportion,
    minimum_quota,
    share_out,
)
from manylora.core.scheduling.policies.request_size import Demand, RequestSizer

RECENT = [Demand(100, 50, 10), Demand(1000, 200, 80), Demand(10, 400, 20)]  # maxima: 1000, 400, 80


def fitted(kind: str) -> RequestSizer:
    sizer = RequestSizer(kind)
    sizer.fit(RECENT)
    return sizer


def test_size_by_hand():
    # (0.4 * 500/1000 + 0.6 * 100/400) * 40/80 = 0.35 * 0.5
    assert fitted("degree-2").size(Demand(500, 100, 40)) == pytest.approx(0.175)
    assert fitted("degree-1").size(Demand(500, 100, 40)) == pytest.approx((0.35 + 0.5) / 2)
    assert fitted("output").size(Demand(500, 100, 40)) == pytest.approx(0.25)


def test_a_request_on_the_base_counts_as_having_the_smallest_adapter():
    sizer = fitted("degree-2")
    assert sizer.size(Demand(500, 100, 0)) == sizer.size(Demand(500, 100, 10)) > 0
    # Longer is larger on the base as well, and no adapter is never larger than some adapter.
    assert sizer.size(Demand(900, 300, 0)) > sizer.size(Demand(500, 100, 0))
    assert sizer.size(Demand(500, 100, 0)) < sizer.size(Demand(500, 100, 11))
    nobody_has_one = RequestSizer("degree-2")
    nobody_has_one.fit([Demand(100, 100, 0)])
    assert nobody_has_one.size(Demand(100, 100, 0)) == pytest.approx(1.0)


def brute_force(points: list[float], k: int) -> float:
    """Try every way to cut sorted points into k runs."""
    points = sorted(points)

    def spread(run: list[float]) -> float:
        mean = sum(run) / len(run)
        return sum((x - mean) ** 2 for x in run)

    best = float("inf")
    for cuts in combinations(range(1, len(points)), k - 1):
        edges = [0, *cuts, len(points)]
        best = min(best, sum(spread(points[a:b]) for a, b in pairwise(edges)))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_clustering_is_exact(seed):
    rng = random.Random(seed)
    points = [rng.choice([rng.random(), rng.lognormvariate(0, 1.5)]) for _ in range(11)]
    for found in cluster(points, 4):
        assert found.wcss == pytest.approx(brute_force(points, len(found.centroids)), abs=1e-12)
        assert list(found.centroids) == sorted(found.centroids)


def test_cut_offs_are_midpoints_and_a_size_on_one_belongs_above():
    clusters = cluster([1.0, 1.2, 5.0, 5.2, 11.0], 3)[-1]
    assert clusters.centroids == pytest.approx((1.1, 5.1, 11.0))
    cuts = cut_offs(clusters)
    assert cuts == pytest.approx((3.1, 8.05))
    plan = QueuePlan(cuts, (1, 1, 1))
    assert [plan.queue_of(size) for size in (0.0, cuts[0] - 1e-9, cuts[0], 8.0, 99.0)] == [0, 0, 1, 1, 2]


def test_least_wcss_always_takes_the_most_queues_and_elbow_fewer():
    rng = random.Random(1)

    def count(points, criterion):
        return len(choose(cluster(points, 4), criterion).centroids)

    alike = [1.0 + 0.1 * rng.random() for _ in range(200)]
    two = [rng.gauss(1, 0.05) for _ in range(100)] + [rng.gauss(10, 0.3) for _ in range(100)]
    three = two + [rng.gauss(20, 0.5) for _ in range(100)]
    four = three + [rng.gauss(80, 0.5) for _ in range(100)]
    assert [count(points, "elbow") for points in (alike, two, three)] == [1, 2, 3]
    assert [count(points, "wcss") for points in (alike, two, three, four)] == [4, 4, 4, 4]
    assert count([2.0] * 50, "elbow") == count([2.0] * 50, "wcss") == 1
    assert count([1.0, 2.0], "wcss") == 2


def load(max_tokens, duration_s, rate, mean_tokens=None):
    return QueueLoad(max_tokens=max_tokens, mean_tokens=mean_tokens or max_tokens, duration_s=duration_s, rate=rate)


def test_minimum_quota_by_hand():
    # 500 tokens for 2 s, 3 a second, within 4 s: 500 * 2 * (1/4 + 3)
    assert minimum_quota(load(500, 2.0, 3.0), 4.0) == pytest.approx(3250)
    # Solved backwards: mu = tokens / (S D) = 3.25 a second, and 1 / (mu - rate) = 4 s.
    processing_rate = 3250 / (500 * 2.0)
    assert 1 / (processing_rate - 3.0) == pytest.approx(4.0)
    assert minimum_quota(load(500, 2.0, 0.0), 4.0) == pytest.approx(250)


def test_the_rest_is_shared_in_proportion_to_the_minima():
    # Minima 3250 and 1750: the 5000 left over go 65 : 35.
    loads = [load(500, 2.0, 3.0), load(1000, 1.0, 1.5)]
    assert [minimum_quota(one, 4.0) for one in loads] == pytest.approx([3250, 1750])
    assert share_out(10_000, loads, 4.0) == (6500, 3500)


def test_minima_that_do_not_fit_give_way_to_what_queues_hold_at_busy_times():
    # 16 requests of 100 and 4 of 400 run on average: 100 * (16 + 2 * 4) and 400 * (4 + 2 * 2).
    loads = [load(1000, 2.0, 8.0, mean_tokens=100), load(2000, 4.0, 1.0, mean_tokens=400)]
    assert sum(minimum_quota(one, 10.0) for one in loads) > 5600
    assert share_out(5600, loads, 10.0) == (2400, 3200)


LOADS = st.builds(
    load,
    st.integers(1, 20_000),
    st.floats(0.01, 100.0),
    st.floats(0.0, 50.0),
    mean_tokens=st.floats(1.0, 5_000.0),
)


@given(st.lists(LOADS, min_size=1, max_size=4), st.integers(400, 60_000), st.integers(1, 100), st.floats(0.1, 100.0))
def test_a_queue_lacks_tokens_only_when_all_smaller_ones_have_theirs(loads, total, least, slo_s):
    """The guarantee of a fast lane, at any load."""
    shares = share_out(total, loads, slo_s, least=least)
    assert sum(shares) == total and min(shares) >= least
    if sum(minimum_quota(one, slo_s) for one in loads) <= total or sum(one.busy_tokens for one in loads) <= total:
        return
    for place, (share, one) in enumerate(zip(shares, loads, strict=True)):
        assert share >= one.busy_tokens or all(larger == least for larger in shares[place + 1 :])


def test_shares_are_whole_and_never_nothing():
    assert in_proportion(10, [1, 1, 1]) == (4, 3, 3)
    assert in_proportion(10, [0, 0, 100]) == (1, 1, 8)
    assert in_proportion(7, [0, 0, 0]) == (3, 2, 2)
    assert in_proportion(4, [1e9, 1, 1, 1]) == (1, 1, 1, 1)
    assert in_proportion(100, [80, 15, 5], least=20) == (60, 20, 20)
    assert in_proportion(100, [70, 25, 5], least=20) == (59, 21, 20)  # 80 shared 70 : 25


def test_the_ledger_returns_tokens_to_where_they_came_from():
    ledger = QuotaLedger((100, 50, 20))
    ledger.charge(1, 60, [0])
    ledger.charge(2, 65, [1, 2])  # lent by two
    assert [ledger.used(queue) for queue in range(3)] == [60, 50, 15]
    assert ledger.free([0]) == 40
    assert ledger.free([0, 1, 2]) == 45
    assert ledger.release(2) == 65
    assert [ledger.used(queue) for queue in range(3)] == [60, 0, 0]
    ledger.check_integrity()


def test_an_overdrawn_queue_gives_nothing_and_the_total_holds():
    ledger = QuotaLedger((50, 50))
    ledger.carry_over(1, 90, 0)  # admitted when the first queue had 100
    assert ledger.free([0]) == 0
    assert ledger.free([1]) == 10  # of 50, for 90 of 100 are held
    with pytest.raises(AssertionError):
        ledger.charge(2, 20, [1])
    ledger.release(1)
    assert ledger.free([1]) == 50


def test_plans_follow_the_history():
    history, sizer = RequestHistory(), RequestSizer("output")
    for index in range(200):
        demand = Demand(10, 10, 0) if index % 4 else Demand(10, 200, 0)
        history.arrived(demand, index * 0.1)
        history.ended(demand, demand.tokens, 1.0 if index % 4 else 9.0)
    sizer.fit(demand for _, demand in history.arrivals)
    plan = plan_queues(history, sizer, criterion="elbow", total=100_000, least=1, slo_s=10.0, now=20.0)
    assert plan.cut_offs == pytest.approx(((10 / 200 + 1) / 2,))
    # 7.5 a second of 20 tokens for 1 s, 2.5 a second of 210 for 9 s, all within 10 s.
    small, large = 20 * 1.0 * 7.6, 210 * 9.0 * 2.6
    assert plan.quotas[0] == pytest.approx(100_000 * small / (small + large), abs=1)
    assert sum(plan.quotas) == 100_000
    static = plan_static(history, sizer, total=100_000, least=1)
    assert static.quotas == (25_000,) * 4
    assert static.cut_offs == pytest.approx([0.05 + 0.95 * part / 4 for part in (1, 2, 3)])
