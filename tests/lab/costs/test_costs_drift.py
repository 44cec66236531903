"""Machines that are slow for a while: what wanders is found again, and drawn again as it was."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs
from sim_profiles import make_profile, sweep

from manylora.core.costs.step_log import StepRecord
from manylora.lab.costs.calibrate import fit_profile
from manylora.lab.costs.drift import Array, estimate_drift, noise_within, speed_between
from manylora.lab.costs.fitted import DriftingSpeed, FittedCost
from manylora.lab.costs.profile import CostProfile, DriftComponent, Noise, SpeedDrift, StepCost, read_profile

OWN = {kind: Noise(mean=1.0, quantiles=(0.9, 0.95, 1.0, 1.05, 1.1)) for kind in ("decode", "prompt")}


def unsteady(*components: DriftComponent, **fields: object) -> CostProfile:
    return make_profile(noise=OWN, speed_drift=SpeedDrift(components=components, noise=OWN), **fields)


def log(factor: Callable[[float], float], *, num: int = 20_000, own: float = 0.1) -> tuple[Array, Array, Array]:
    """Return beginnings, times and prices of steps on a machine that is so slow at each moment."""
    rng = random.Random(3)
    now, began_at, took, prices = 0.0, [], [], []
    for _ in range(num):
        prices.append(rng.uniform(0.02, 0.1))
        took.append(prices[-1] * factor(now) * math.exp(rng.gauss(0.0, own)))
        began_at.append(now)
        now += took[-1] + (rng.expovariate(5.0) if rng.random() < 0.1 else 0.0)  # now and then there is nothing to do
    return np.array(began_at), np.array(took), np.array(prices)


@pytest.mark.parametrize(("size", "length_s"), [(0.1, 2.0), (0.25, 6.0), (0.4, 0.8)])
def test_the_spells_of_a_log_are_those_it_was_made_with(size: float, length_s: float):
    found = estimate_drift(*log(DriftingSpeed([DriftComponent(size=size, length_s=length_s)], random.Random(1)).factor))
    assert math.sqrt(sum(one.size**2 for one in found.components)) == pytest.approx(size, rel=0.15)
    longest = max(found.components, key=lambda one: one.size)
    assert longest.length_s == pytest.approx(length_s, rel=0.5)
    assert found.share == pytest.approx(size**2 / (size**2 + 0.1**2), rel=0.2)


def test_short_and_long_spells_are_told_apart():
    truth = [DriftComponent(size=0.15, length_s=0.5), DriftComponent(size=0.2, length_s=20.0)]
    short, *_, long = estimate_drift(*log(DriftingSpeed(truth, random.Random(2)).factor, num=40_000)).components
    assert short.size == pytest.approx(0.15, rel=0.3)
    assert short.length_s < 2.0 < 8.0 < long.length_s
    assert long.size == pytest.approx(0.2, rel=0.35)


@pytest.mark.parametrize("own", [0.0, 0.1, 0.4])
def test_a_steady_machine_has_none(own: float):
    for num in (300, 20_000):
        assert estimate_drift(*log(lambda now: 1.0, num=num, own=own)).components == ()


def test_a_drift_is_a_spell_longer_than_the_log():
    at, took, prices = log(lambda now: 1.0 + 0.5 * now / 180, num=2000)
    found = estimate_drift(at, took, prices)
    assert max(found.components, key=lambda one: one.size).length_s > 10.0
    is_known = np.arange(2000) // 20 % 4 != 3
    speeds = speed_between(found, at[~is_known], at[is_known], (took / prices)[is_known])
    assert np.abs(speeds / (1.0 + 0.5 * at[~is_known] / 180) - 1.0).max() < 0.1


def test_slow_spells_and_fast_ones_come_out_of_a_sweep_beside_the_prices():
    truth = unsteady(DriftComponent(size=0.2, length_s=0.2))  # a machine whose steps take milliseconds
    fitted = fit_profile(sweep(truth, seconds=25.0, rng=random.Random(0)))
    assert fitted.speed_drift is not None
    components = fitted.speed_drift.components
    assert math.sqrt(sum(one.size**2 for one in components)) == pytest.approx(0.2, rel=0.2)
    assert max(components, key=lambda one: one.size).length_s == pytest.approx(0.2, rel=0.6)
    drawn = np.interp(np.linspace(0.0, 4.0, 101), range(5), OWN["decode"].quantiles)
    own = np.std(np.log(fitted.speed_drift.noise["decode"].quantiles))
    assert np.std(np.log(drawn)) == pytest.approx(own, rel=0.4)
    assert own < np.std(np.log(fitted.noise["decode"].quantiles)) / 2
    # With the machine's speed taken out, the prices explain more of what is left.
    assert all(error.steady_r2 is not None and error.steady_r2 > error.r2 for error in fitted.errors)
    cost, true_cost = StepCost(fitted.terms, fitted.rows), StepCost(truth.terms, truth.rows)
    ratios = [
        (cost.seconds(step.features) + fitted.turn_s) / (true_cost.seconds(step.features) + truth.turn_s)
        for step in sweep(truth, seconds=1.0)
        if isinstance(step, StepRecord)
    ]
    assert np.quantile(np.abs(np.array(ratios) / np.median(ratios) - 1.0), 0.9) < 0.06


def test_a_steady_engine_s_profile_has_no_components():
    assert fit_profile(sweep(make_profile(noise=OWN), seconds=4.0, rng=random.Random(0))).speed_drift is None


def test_a_pace_comes_from_a_seed_and_does_as_much_as_a_steady_machine():
    cost = FittedCost(
        unsteady(DriftComponent(size=0.3, length_s=2.0), DriftComponent(size=0.2, length_s=0.1)), random.Random(7)
    )
    speed, other = cost.speed(0), cost.speed(1)
    assert speed is not None and other is not None
    times = [0.05 * index for index in range(60_000)]
    factors = [speed.factor(at) for at in times]
    again = FittedCost(
        unsteady(DriftComponent(size=0.3, length_s=2.0), DriftComponent(size=0.2, length_s=0.1)), random.Random(7)
    ).speed(0)
    assert again is not None
    assert [again.factor(at) for at in times[:50]] == factors[:50]
    assert again.factor(times[49]) == factors[49]  # asked twice, answered alike
    assert abs(np.corrcoef(factors, [other.factor(at) for at in times])[0, 1]) < 0.15  # machines of their own
    assert np.mean(1 / np.array(factors)) == pytest.approx(1.0, abs=0.03)
    assert np.std(np.log(factors)) == pytest.approx(math.hypot(0.3, 0.2), rel=0.1)


def test_only_a_profile_with_spells_wanders():
    assert FittedCost(make_profile(noise=OWN), random.Random(0)).speed() is None
    profile = unsteady(DriftComponent(size=0.2, length_s=1.0))
    assert FittedCost(profile).speed() is None  # nor without chance
    steady = structs.replace(profile, speed_drift=None)
    assert FittedCost(steady, random.Random(0)).speed() is None
    # Draws of a profile without components are what they were before there were any.
    costs = [FittedCost(one, random.Random(0)) for one in (steady, make_profile(noise=OWN))]
    features = next(line.features for line in sweep(profile, seconds=0.1) if isinstance(line, StepRecord))
    one, other = ([cost.features_time_s(features) for _ in range(9)] for cost in costs)
    assert one == other


def test_profiles_with_and_without_spells_read_back(tmp_path: Path):
    path = tmp_path / "profile.json"
    profile = unsteady(DriftComponent(size=0.2, length_s=1.0), DriftComponent(size=0.1, length_s=30.0))
    profile.write(path)
    assert read_profile(path) == profile
    assert '"components": [{"size": 0.2, "length_s": 1.0}' in path.read_text()
    fields = msgspec.json.decode(path.read_bytes())
    del fields["speed_drift"]  # as profiles were before
    path.write_bytes(msgspec.json.encode(fields))
    assert read_profile(path) == make_profile(noise=OWN)


def slow_now_and_then(factor: float, quick_s: float, slow_s: float, seed: int) -> Callable[[float], float]:
    """Return a machine with two speeds, which no sum of normal variables looks like."""
    rng = random.Random(seed)
    until, is_slow = 0.0, True

    def at(now: float) -> float:
        nonlocal until, is_slow
        while now >= until:
            is_slow = not is_slow
            until += rng.expovariate(1 / (slow_s if is_slow else quick_s))
        return factor if is_slow else 1.0

    return at


def tail(step_s: Callable[[float, float], float], seed: int) -> float:
    """Return the 99th percentile of time to first token of one-step requests, one after the other, at 60 % load."""
    rng = random.Random(f"requests/{seed}")
    arrived_at = free_at = 0.0
    times = []
    for _ in range(60_000):
        price = rng.uniform(0.02, 0.1)
        arrived_at += rng.expovariate(0.6 / 0.06)
        begins_at = max(arrived_at, free_at)
        free_at = begins_at + step_s(price, begins_at)
        times.append(free_at - arrived_at)
    return float(np.quantile(times, 0.99))


@pytest.mark.parametrize(
    ("machine", "without_memory"),
    [
        (lambda seed: lambda now: 1.0, 1.0),
        (lambda seed: DriftingSpeed([DriftComponent(size=0.2, length_s=1.0)], random.Random(seed)).factor, 0.8),
        (lambda seed: slow_now_and_then(1.6, 4.0, 1.0, seed), 0.65),
    ],
    ids=["steady", "wandering", "slow now and then"],
)
def test_queues_in_front_of_a_machine_are_as_long_as_they_were(
    machine: Callable[[int], Callable[[float], float]], without_memory: float
):
    """What is drawn by what was found makes the tails of the machine it was found on; without a memory it does not."""
    began_at, took, prices = log(machine(2), num=60_000)
    found = estimate_drift(began_at, took, prices)
    whole = Noise(mean=took.sum() / prices.sum(), quantiles=tuple(np.quantile(took / prices, np.linspace(0, 1, 101))))
    left = noise_within(whole, found.share)
    rng = random.Random(5)

    def draw(noise: Noise) -> float:
        return noise.quantiles[rng.randrange(101)]

    measured, drawn, forgetful = 0.0, 0.0, 0.0
    for seed in (10, 11):
        truth, speed = machine(seed), DriftingSpeed(found.components, random.Random(seed + 10))
        measured += tail(lambda price, now: price * truth(now) * math.exp(rng.gauss(0.0, 0.1)), seed)  # noqa: B023
        drawn += tail(lambda price, now: price * speed.factor(now) * draw(left), seed)  # noqa: B023
        forgetful += tail(lambda price, now: price * draw(whole), seed)
    assert drawn == pytest.approx(measured, rel=0.1)
    assert forgetful < (without_memory + 0.05) * measured
