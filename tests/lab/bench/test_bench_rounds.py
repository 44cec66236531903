"""The one statistic of benchmarks."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from publishing import Others, reason_to_refuse
from ratios import Ratio, ratio_by_round

from manylora.lab.bench.rounds import in_turns


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_a_ratio_is_the_median_of_rounds_within_its_interval(rounds: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*rounds, strict=True)
    ratio = ratio_by_round(ours, theirs)
    assert ratio.median == statistics.median(one / other for one, other in rounds)
    assert min(ratio.rounds) <= ratio.low <= ratio.high <= max(ratio.rounds)
    assert ratio == ratio_by_round(ours, theirs)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        speed = rng.lognormal(0, 0.3, 9)  # the machine's, which both sides of a round meet
        noise = rng.lognormal(0, 0.05, (2, 9))
        ratio = ratio_by_round(1.5 * speed * noise[0], speed * noise[1])
        hits += ratio.low <= 1.5 <= ratio.high
    assert 85 <= hits <= 100


def test_sides_take_turns_and_each_begins_once() -> None:
    turns = list(in_turns(["a", "b", "c"], 3))
    assert [name for number, name in turns if number == 0] == ["a", "b", "c"]
    assert [name for number, name in turns if number == 1] == ["b", "c", "a"]
    assert sum(number < 0 for number, _ in turns) == 3


@pytest.mark.parametrize(
    ("num_rounds", "busy_share", "reason"),
    [(4, 0.0, "at least 5"), (5, 0.2, "quiet machine"), (5, 0.01, None)],
)
def test_a_result_is_refused_with_the_reason(num_rounds: int, busy_share: float, reason: str | None) -> None:
    found = reason_to_refuse(num_rounds, busy_share)
    assert found is None if reason is None else reason in str(found)


def test_own_work_is_not_that_of_others() -> None:
    others = Others()
    sum(range(1_000_000))
    assert 0.0 <= others.share() <= 1.0


def test_a_goal_is_met_or_missed_by_a_whole_interval() -> None:
    verdicts = [Ratio(1.0, low, high, ()).verdict(1.1) for low, high in ((0.9, 1.1), (0.9, 1.2), (1.15, 1.2))]
    assert verdicts == ["met", "open", "missed"]
