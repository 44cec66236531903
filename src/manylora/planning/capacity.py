"""Capacity: the highest rate that meets the SLO, found by bracketing and bisection.

Rates are compared by their ratio: the search ends when the lowest that missed the SLO is within the tolerance of the
highest that met it. What is returned is the one that kept it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manylora.errors import ConfigError
from manylora.planning.load_test import LoadTest

__all__ = ["Capacity", "find_capacity"]

WIDEN = 2.0
"""Factor between rates while there is no bracket."""

MOST_WIDENINGS = 8
"""How often the first guess is halved before there is no rate at all, or doubled before there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a search found.

    Args:
        rate: Requests per second; 0 if every rate that was tried broke the objective.
        kept: The load test at that rate; ``None`` if there is none.
        broken: The lowest rate that broke the objective; ``None`` if none did.
        load tests: Every load test, in the order they were made.
    """

    rate: float
    kept: LoadTest | None
    broken: LoadTest | None
    load_tests: tuple[LoadTest, ...]


def find_capacity(try_rate: Callable[[float], LoadTest], *, start: float, tolerance: float = 0.02) -> Capacity:
    """Search for the highest rate that meets the SLO.

    Args:
        try_rate: Tries a rate in requests per second; what meets the SLO at one rate keeps it at every lower one.
        start: First guess.
        tolerance: How far the answer may lie below the truth, as a share of it.

    Raises:
        ConfigError: The guess or the tolerance makes no sense.
    """
    if not start > 0 or not 0 < tolerance < 1:
        raise ConfigError(f"Got {start = }, {tolerance = }, expected a rate above 0 and a share in (0, 1)")
    load_tests: list[LoadTest] = []

    def attempt(rate: float) -> LoadTest:
        load_tests.append(try_rate(rate))
        return load_tests[-1]

    kept: LoadTest | None = None
    broken: LoadTest | None = None
    rate = start
    for _ in range(1 + MOST_WIDENINGS):
        load_test = attempt(rate)
        if load_test.is_kept:
            kept, rate = load_test, rate * WIDEN
        else:
            broken, rate = load_test, rate / WIDEN
        if kept is not None and broken is not None:
            break
    if kept is None or broken is None:
        return Capacity(
            rate=kept.rate if kept is not None else 0.0, kept=kept, broken=broken, load_tests=tuple(load_tests)
        )
    while broken.rate > kept.rate * (1 + tolerance):
        middle = attempt((kept.rate * broken.rate) ** 0.5)
        if middle.is_kept:
            kept = middle
        else:
            broken = middle
    return Capacity(rate=kept.rate, kept=kept, broken=broken, load_tests=tuple(load_tests))
