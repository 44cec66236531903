"""What `price` stands on: measured costs, and the chance of reuse learnt from gaps."""

from __future__ import annotations

import random

import pytest

from manylora.core.memory.eviction import LinearCost
from manylora.core.memory.eviction.price import ReuseModel


class TestLinearCost:
    def test_starts_from_its_guess(self):
        cost = LinearCost(0.5, 0.25, typical=4.0)
        assert cost.seconds(4.0) == pytest.approx(1.5)
        assert cost.marginal_s(4.0) == pytest.approx(1.0)

    def test_finds_a_line(self):
        cost = LinearCost(1.0, 1.0, typical=10.0)
        for amount in (1, 5, 20, 40) * 100:
            cost.observe(amount, 0.2 + 0.03 * amount)
        assert cost.seconds(0) == pytest.approx(0.2, rel=0.15)
        assert cost.marginal_s(1) == pytest.approx(0.03, rel=0.1)

    def test_follows_a_change(self):
        cost = LinearCost(0.0, 0.01, typical=10.0)
        for _ in range(3000):
            cost.observe(10, 0.1)
        for _ in range(1500):
            cost.observe(10, 0.4)
        assert cost.seconds(10) == pytest.approx(0.4, rel=0.05)

    def test_nothing_is_below_zero(self):
        cost = LinearCost(0.01, 0.001, typical=10.0)
        for amount, seconds in ((10, 1.0), (100, 0.1)) * 50:
            cost.observe(amount, seconds)
        assert cost.marginal_s(10) == 0.0
        assert cost.seconds(1000) == pytest.approx(0.55, rel=0.05)
        cost = LinearCost(0.0, 0.001, typical=10.0)
        for amount, seconds in ((10, 0.01), (100, 10.0)) * 50:
            cost.observe(amount, seconds)
        assert cost.seconds(0) == 0.0 and cost.seconds(100) > 1.0


def drive(sequence: list[str], gap_s: float = 1.0) -> tuple[ReuseModel[str], float]:
    """Use one thing after the other, each for an instant."""
    model: ReuseModel[str] = ReuseModel()
    now = 0.0
    for key in sequence:
        now += gap_s
        model.used(key, now)
        model.idle(key, now)
    return model, now


def independent(num_uses: int, num_keys: int) -> list[str]:
    """Zipf's law, every use drawn afresh: recency says nothing that frequency does not say better."""
    rng = random.Random(1)
    return [f"k{i}" for i in rng.choices(range(num_keys), [1 / (i + 1) for i in range(num_keys)], k=num_uses)]


def sessions(num_uses: int) -> list[str]:
    """Whatever was used is used twelve times in a row, then never again: frequency says nothing."""
    return [f"s{i // 12}" for i in range(num_uses)]


def test_before_any_evidence_younger_is_likelier():
    model, _ = drive([])
    model.idle("old", 0.0)
    model.idle("young", 9.0)
    assert model.rate("young", 10.0) > model.rate("old", 10.0) > 0.0


def test_rates_are_uses_per_second():
    # Twelve things in turn, one use a second: every gap ends at 12 s, in the bucket from 8 to 16 s, after 4 s in it.
    model, now = drive([f"k{i % 12}" for i in range(3000)])
    ages = {age: model.rate(f"k{(2999 - age) % 12}", now) for age in range(12)}
    assert ages[9] == pytest.approx(1 / 4, rel=0.05)
    assert all(rate < 0.01 for age, rate in ages.items() if 0 < age < 8)


def test_independent_draws_are_ranked_by_frequency():
    model, now = drive(independent(20_000, 200))
    model.used("k1", now)
    model.idle("k1", now)
    model.idle("k150", now + 20.0)
    assert model.rate("k1", now + 21.0) > 3 * model.rate("k150", now + 21.0), "popular, though idle for longer"


def test_sessions_are_ranked_by_age():
    model, now = drive(sessions(6000))
    over, running = f"s{5999 // 12 - 5}", f"s{5999 // 12}"
    assert model.group(over, now) == model.group(running, now), "used equally often"
    # Sessions use theirs every second, and one that is still in use a second on is likely to be used again.
    assert model.rate(running, now + 1.0) > 20 * model.rate(over, now + 1.0)


def test_time_at_risk_is_booked_once_and_in_full():
    model: ReuseModel[str] = ReuseModel()
    model.used("a", 0.0)
    model.idle("a", 0.0)
    for now in (1.0, 2.5, 2.5, 6.0):  # every use of b books some of a's
        model.used("b", now)
    model.idle("a", 0.0)  # saying so again changes nothing
    model.used("a", 7.25)
    assert sum(map(sum, model._at_risk)) == pytest.approx(7.25)
    assert sum(model._uses_by_age) == sum(model._uses_by_class) == 1.0
    model.idle("a", 8.0)
    model.forget("a", 10.0)
    assert sum(map(sum, model._at_risk)) == pytest.approx(9.25)
    model.forget("a", 11.0)


def test_uses_while_in_use_count_but_close_no_gap():
    model: ReuseModel[str] = ReuseModel()
    for now in (0.0, 1.0, 2.0):
        model.used("a", now)
    model.idle("a", 3.0)
    assert sum(model._uses_by_age) == 0.0
    once: ReuseModel[str] = ReuseModel()
    once.used("a", 0.0)
    once.idle("a", 3.0)
    assert model.group("a", 3.0) > once.group("a", 3.0)
