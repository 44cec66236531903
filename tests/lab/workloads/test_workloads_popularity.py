"""Popularity: shares, locality and fashion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from manylora.core.errors import ConfigError
from manylora.lab.workloads.locality import Drift, OrderReplay, Sessions, StackDistances
from manylora.lab.workloads.popularity import (
    ExplicitShares,
    GeometricShares,
    MeasuredShares,
    Popularity,
    PowerShares,
    RankShares,
    ShareLaw,
    TurnTaking,
    UniformShares,
    ZipfShares,
    draw_places,
)

RANKS = [8, 16, 32, 64, 128] * 20
TIMES = np.arange(20_000) / 8


def lru_hit_rate(uses: Iterable[int], slots: int) -> float:
    order: list[int] = []
    hits = total = 0
    for use in uses:
        total += 1
        if use in order:
            hits += use in order[-slots:]
            order.remove(use)
        order.append(use)
    return hits / total


@pytest.mark.parametrize("law", [UniformShares(), ZipfShares(), PowerShares(alpha=0.3), GeometricShares()], ids=str)
def test_shares_fall_and_add_up(law: ShareLaw) -> None:
    shares = law.shares(100)
    assert shares.sum() == pytest.approx(1) and np.all(np.diff(shares) <= 1e-15)


@pytest.mark.parametrize(("alpha", "top_tenth"), [(0.1, 0.79), (0.3, 0.50), (0.6, 0.25), (1.0, 0.10)])
def test_s_loras_law_has_its_published_top_tenth(alpha: float, top_tenth: float) -> None:
    assert PowerShares(alpha=alpha).shares(100)[:10].sum() == pytest.approx(top_tenth, abs=0.005)


def test_an_alpha_of_one_is_uniform() -> None:
    assert PowerShares(alpha=1.0).shares(50) == pytest.approx(np.full(50, 1 / 50))


def test_draws_follow_the_shares() -> None:
    shares = ZipfShares(s=1.2, q=0.0).shares(30)
    drawn = np.bincount(draw_places(shares, 200_000, np.random.default_rng(0)), minlength=30) / 200_000
    assert np.abs(drawn - shares).max() < 0.004


LAWS = [
    ExplicitShares(weights=tuple(float(index) for index in range(100))),
    GeometricShares(),
    PowerShares(alpha=0.27),
    RankShares(),
    Sessions(),
    TurnTaking(),
    UniformShares(),
    ZipfShares(),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: str(law.kind))
def test_every_request_gets_an_adapter_and_the_same_one_again(law: Popularity) -> None:
    chosen = law.assign(TIMES, RANKS, np.random.default_rng(1))
    assert chosen.shape == TIMES.shape and chosen.min() >= 0 and chosen.max() < 100
    assert np.array_equal(chosen, law.assign(TIMES, RANKS, np.random.default_rng(1)))
    assert len(law.assign(TIMES[:0], RANKS, np.random.default_rng(1))) == 0


def test_chameleons_default_is_uniform_over_ranks_and_steep_inside_them() -> None:
    chosen = RankShares().assign(TIMES, RANKS, np.random.default_rng(0)).tolist()
    by_rank = Counter(RANKS[index] for index in chosen)
    assert all(count / len(chosen) == pytest.approx(0.2, abs=0.01) for count in by_rank.values())
    of_rank_8 = sorted(Counter(index for index in chosen if RANKS[index] == 8).values(), reverse=True)
    assert of_rank_8[0] / by_rank[8] == pytest.approx(PowerShares(alpha=0.27).shares(20)[0], abs=0.02)


def test_power_law_over_ranks_prefers_the_small() -> None:
    law = RankShares(ranks=PowerShares(alpha=0.3), adapters=UniformShares())
    by_rank = Counter(RANKS[index] for index in law.assign(TIMES, RANKS, np.random.default_rng(0)).tolist())
    assert [rank for rank, _ in by_rank.most_common()] == [8, 16, 32, 64, 128]


def test_popular_adapters_are_of_any_rank() -> None:
    tops = [
        RANKS[int(np.argmax(np.bincount(ZipfShares().assign(TIMES[:2000], RANKS, np.random.default_rng(seed)))))]
        for seed in range(60)
    ]
    assert set(tops) == set(RANKS)


def test_explicit_shares_need_one_for_each() -> None:
    with pytest.raises(ConfigError, match="2 weights for 100 adapters"):
        ExplicitShares(weights=(1.0, 2.0)).assign(TIMES, RANKS, np.random.default_rng(0))


def test_measured_counts_are_shares(tmp_path: Path) -> None:
    file = tmp_path / "uses.csv"
    file.write_text("adapter_id,uses_all_68195_rows\nL0,10\nL1,60\nL2,30\nL3,1\n")
    law = MeasuredShares(file=file)
    uses = np.bincount(law.assign(TIMES, [8, 16, 32], np.random.default_rng(0)), minlength=3) / len(TIMES)
    assert sorted(uses.tolist()) == pytest.approx([0.1, 0.3, 0.6], abs=0.01)
    with pytest.raises(ConfigError, match="counts of 4 adapters, expected at least 5"):
        law.assign(TIMES, [8] * 5, np.random.default_rng(0))


# -- locality ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def distances(tmp_path: Path) -> Path:
    file = tmp_path / "distances.csv"
    file.write_text("slots,lru_hit_all\n1,0.4\n4,0.75\n16,0.86\n64,0.9\n")
    return file


def test_stack_distances_give_the_hit_rates_they_were_measured_as(distances: Path) -> None:
    uses = StackDistances(file=distances).assign(TIMES[:8000], RANKS * 20, np.random.default_rng(0)).tolist()
    for slots, rate in ((1, 0.4), (4, 0.75), (16, 0.86), (64, 0.9)):
        assert lru_hit_rate(uses, slots) == pytest.approx(rate, abs=0.02)


def test_sessions_have_locality_and_fewer_of_them_have_more() -> None:
    def rate(law: Popularity) -> float:
        return lru_hit_rate(law.assign(TIMES[:8000], RANKS * 5, np.random.default_rng(0)).tolist(), 8)

    assert rate(Sessions(num_at_once=4)) > rate(Sessions(num_at_once=30)) + 0.2
    assert rate(Sessions(num_at_once=30)) > rate(ZipfShares(s=0.95, q=6.5)) + 0.1


def test_sessions_are_as_long_as_measured() -> None:
    """With one session at a time and many adapters, a run of one adapter is about a session."""
    chosen = Sessions(num_at_once=0.05, starts=UniformShares()).assign(
        TIMES[:5000], [8] * 5000, np.random.default_rng(0)
    )
    per_adapter = np.bincount(chosen)
    per_adapter = per_adapter[per_adapter > 0]
    # LN(0.97, 0.94) rounded up: a mean of 4.6 and 15 % of sessions with one request, and a few adapters get two.
    assert float(per_adapter.mean()) == pytest.approx(5.6, abs=1.2)


def test_the_order_of_a_trace_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    rows = [
        "[]",
        "\"[{'modelVersionId': 'a', 'scale': 1.0}]\"",
        "\"[{'modelVersionId': 'b', 'scale': 1}, {'modelVersionId': 'a', 'scale': 1}]\"",
    ]
    file.write_text("predict_type,lora_args\n" + "".join(f"x,{row}\n" for row in rows))
    chosen = OrderReplay(file=file).assign(TIMES[:7], [8, 16, 32], np.random.default_rng(0)).tolist()
    first, second = chosen[0], chosen[1]
    assert first != second and chosen == [first, second, first, first, second, first, first]


# -- fashion -----------------------------------------------------------------------------------------------------------


def test_drift_replaces_the_popular_by_others_of_their_rank() -> None:
    chosen = ZipfShares().assign(TIMES, RANKS, np.random.default_rng(0))
    drift = Drift(period_s=1000.0, top=10, share=0.7)
    drifted = drift.apply(TIMES, chosen, RANKS, np.random.default_rng(1))
    assert np.array_equal(drifted[TIMES < 1000], chosen[TIMES < 1000])
    assert [RANKS[index] for index in drifted] == [RANKS[index] for index in chosen]

    def top(uses: np.ndarray) -> set[int]:
        return set(np.argsort(-np.bincount(uses, minlength=100), kind="stable")[:10].tolist())

    before, after = top(drifted[TIMES < 1000]), top(drifted[(TIMES >= 1000) & (TIMES < 2000)])
    assert 5 <= len(before - after) <= 9  # seven are exchanged; who is tenth is chance


def test_no_drift_changes_nothing() -> None:
    chosen = ZipfShares().assign(TIMES, RANKS, np.random.default_rng(0))
    still = Drift(period_s=100.0, share=0.0).apply(TIMES, chosen, RANKS, np.random.default_rng(1))
    assert np.array_equal(still, chosen)
