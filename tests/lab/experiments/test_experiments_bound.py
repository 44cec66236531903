"""The clairvoyant bound against the true optimum, and the eviction experiment, shortened."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from manylora.lab.experiments.calculations import most_saved
from manylora.lab.experiments.cases import cases_of
from manylora.lab.experiments.read import read_experiment
from manylora.lab.experiments.running import Runner
from manylora.lab.experiments.spec import merge


def best_by_trying(uses: list[str], sizes: dict[str, int], savings: dict[str, float], capacity: int) -> float:
    """Try every choice of what to keep after every use."""

    @cache
    def best(at: int, kept: frozenset[str]) -> float:
        if at == len(uses):
            return 0.0
        saved = savings[uses[at]] if uses[at] in kept else 0.0
        there = sorted(kept | {uses[at]})
        options = []
        for mask in range(1 << len(there)):
            chosen = frozenset(item for i, item in enumerate(there) if mask >> i & 1)
            # All items that are kept had to fit beside the item in use.
            if sum(sizes[item] for item in chosen | {uses[at]}) <= capacity:
                options.append(best(at + 1, chosen))
        return saved + max(options)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_the_optimum_relaxed(seed):
    rng = random.Random(seed)
    items = "abcdef"
    sizes = {item: rng.randint(1, 5) for item in items}
    savings = {item: float(rng.randint(1, 9)) for item in items}
    uses = [rng.choice(items) for _ in range(14)]
    capacity = rng.randint(5, 10)
    truth = best_by_trying(uses, sizes, savings, capacity)
    assert most_saved(uses, sizes, savings, capacity, whole=True) == pytest.approx(truth)
    bound = most_saved(uses, sizes, savings, capacity)
    assert bound >= truth - 1e-6
    repeats = sum(savings[item] for at, item in enumerate(uses) if item in uses[:at])
    assert bound <= repeats + 1e-6


def test_with_one_size_the_bound_is_belady():
    # a b c a b c with room for two: Belady keeps one of the first two across, then one more.
    sizes, ones = dict.fromkeys("abc", 1), dict.fromkeys("abc", 1.0)
    assert most_saved("abcabc", sizes, ones, 2) == pytest.approx(2.0)
    assert most_saved("abcabc", sizes, ones, 3) == pytest.approx(3.0)
    assert most_saved("abcabc", sizes, ones, 1) == pytest.approx(0.0)
    assert most_saved("aabb", sizes, ones, 1) == pytest.approx(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("traffic", ["independent", "sessions"])
def test_no_policy_beats_the_bound_and_price_is_not_beaten_by_much(traffic):
    experiment = read_experiment("manylora/eviction")
    experiment = replace(experiment, workload=merge(experiment.workload, {"num_requests": 600}))
    cases = {
        (setup, point): case
        for (setup, point, _), case in cases_of(experiment, seeds=1, traces=None).items()
        if point in (f"{traffic}, 5 %", f"{traffic}, 20 %")
    }
    results = Runner(None).run(cases.values())
    for point in {point for _, point in cases}:
        avoided = {setup: results[cases[setup, point].key].figures["loading_avoided"] for setup in experiment.setups}
        bound = avoided.pop("clairvoyant")
        assert 0.0 < bound < 1.0
        assert all(0.0 <= value <= bound for value in avoided.values())
        assert avoided["none"] < 0.01
        assert avoided["price"] > max(avoided.values()) - 0.03 * bound
