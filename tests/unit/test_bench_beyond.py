"""The comparison with Chameleon plans pairs of equal requests, and reports changes seed by seed."""

from __future__ import annotations

from pathlib import Path

import beyond
import pytest

from manylora.experiments import Result
from manylora.experiments.cases import read_setup


def test_both_sides_are_asked_the_same():
    cases = beyond.plan(Path("none"), [1, 2], 50.0, quick=False)
    for (place, name, seed), case in cases.items():
        other = cases[place, beyond.OPPONENT, seed]
        assert (case.workload, case.seed) == (other.workload, other.seed), name
        read_setup(case.setup)
    devices = {tuple(case.setup[key] for key in beyond.DEVICE) for case in cases.values()}
    assert len(devices) == 1


def test_changes_are_taken_seed_by_seed():
    place = ("published", 9.0)
    found = {
        (place, beyond.OPPONENT): [Result({"ttft_p99": value}, {}) for value in (1.0, 4.0)],
        (place, beyond.CHAMPION): [Result({"ttft_p99": value}, {}) for value in (0.5, 2.0)],
    }
    middle, low, high = beyond.change(found, place, beyond.CHAMPION, "ttft_p99")
    assert middle == pytest.approx(-0.5)
    assert low == pytest.approx(-0.5)
    assert high == pytest.approx(-0.5)


def test_a_capacity_lies_between_loads():
    p99 = dict(zip(beyond.LOADS["production"], (1.0, 2.5, 10.0), strict=True))
    found = {(("production", rate), beyond.CHAMPION): [Result({"ttft_p99": value}, {})] for rate, value in p99.items()}
    low, high = beyond.LOADS["production"][1:]
    assert beyond.capacities(found, "production", beyond.CHAMPION) == pytest.approx((low + high) / 2)
