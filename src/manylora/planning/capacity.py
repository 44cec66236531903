"""Capacity: the highest rate that keeps a promise, found by bracketing and bisection.

Rates are compared by their ratio: the search ends when the lowest that broke the promise is within the tolerance of the
highest that kept it. What is returned is the one that kept it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manylora.errors import ConfigError
from manylora.planning.trial import Trial

__all__ = ["Capacity", "find_capacity"]

WIDEN = 2.0
"""Factor between rates while there is no bracket."""

MOST_WIDENINGS = 8
"""How often the first guess is halved before there is no rate at all, or doubled before there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a search found.

    Args:
        rate: Requests per second; 0 if every rate that was tried broke the promise.
        kept: The trial at that rate; ``None`` if there is none.
        broken: The lowest rate that broke the promise; ``None`` if none did.
        trials: Every trial, in the order they were made.
    """

    rate: float
    kept: Trial | None
    broken: Trial | None
    trials: tuple[Trial, ...]


def find_capacity(try_rate: Callable[[float], Trial], *, start: float, tolerance: float = 0.02) -> Capacity:
    """Search for the highest rate that keeps a promise.

    Args:
        try_rate: Tries a rate in requests per second; what keeps a promise at one rate keeps it at every lower one.
        start: First guess.
        tolerance: How far the answer may lie below the truth, as a share of it.

    Raises:
        ConfigError: The guess or the tolerance makes no sense.
    """
    if not start > 0 or not 0 < tolerance < 1:
        raise ConfigError(f"Got {start = }, {tolerance = }, expected a rate above 0 and a share in (0, 1)")
    trials: list[Trial] = []

    def attempt(rate: float) -> Trial:
        trials.append(try_rate(rate))
        return trials[-1]

    kept: Trial | None = None
    broken: Trial | None = None
    rate = start
    for _ in range(1 + MOST_WIDENINGS):
        trial = attempt(rate)
        if trial.is_kept:
            kept, rate = trial, rate * WIDEN
        else:
            broken, rate = trial, rate / WIDEN
        if kept is not None and broken is not None:
            break
    if kept is None or broken is None:
        return Capacity(rate=kept.rate if kept is not None else 0.0, kept=kept, broken=broken, trials=tuple(trials))
    while broken.rate > kept.rate * (1 + tolerance):
        middle = attempt((kept.rate * broken.rate) ** 0.5)
        if middle.is_kept:
            kept = middle
        else:
            broken = middle
    return Capacity(rate=kept.rate, kept=kept, broken=broken, trials=tuple(trials))
