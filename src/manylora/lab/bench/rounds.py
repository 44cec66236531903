"""The one statistic of comparisons by time: the ratio of each round, its median, and an interval by bootstrap.

The sides take turns within a round, so that both meet the machine at the same speed, and the order rotates, so that
none always runs first. A ratio is taken within a round; over the rounds it has a median. The interval is that of the
median under resampling of rounds: it says how far this run of the benchmark is to be trusted, not how machines differ.
Ratios of medians, means and best-of times are not used anywhere.

A result is worth keeping only from enough rounds on a machine without other work; `reason_to_refuse` says what is
missing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "LEAST_ROUNDS",
    "MOST_BUSY",
    "Middle",
    "Others",
    "Ratio",
    "in_turns",
    "middle_of_rounds",
    "ratio_by_round",
    "reason_if_busy",
    "reason_to_refuse",
]

LEAST_ROUNDS = 5
"""Fewer rounds give no interval worth the name."""

MOST_BUSY = 0.05
"""Most of the machine's processor time that other processes may take during a benchmark."""

RESAMPLES = 10_000
COVERED = 0.95


@dataclass(frozen=True, slots=True)
class Middle:
    """A figure over the rounds.

    Args:
        median: Median of the rounds.
        low: Lower end of the interval for the median.
        high: Upper end.
        rounds: The figure of each round.
    """

    median: float
    low: float
    high: float
    rounds: tuple[float, ...]

    def __str__(self) -> str:
        if len(self.rounds) == 1:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True)
class Ratio(Middle):
    """A ratio over the rounds, taken within each."""

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def middle_of_rounds(values: Sequence[float]) -> Middle:
    """Return a figure that is compared with a limit rather than with another side, with a 95 % interval of its median.

    The resampling is seeded, so that a table can be made again from its figures.
    """
    return Middle(*_resampled(values))


def ratio_by_round(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the ratio of two series of the same rounds, with a 95 % interval of its median."""
    return Ratio(*_resampled([one / other for one, other in zip(numerators, denominators, strict=True)]))


def _resampled(values: Sequence[float]) -> tuple[float, float, float, tuple[float, ...]]:
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = 100 * (1 - COVERED) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return statistics.median(values), float(low), float(high), tuple(values)


def in_turns(names: Sequence[str], num_rounds: int, *, num_warm_up: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the number of the round and the name of the side whose turn it is.

    Rounds to warm up have negative numbers; every round begins with another side.
    """
    for number in range(-num_warm_up, num_rounds):
        first = max(0, number) % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


class Others:
    """The share of the machine's processor time that other processes take, from construction on."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def share(self) -> float:
        """Return the share since construction, 0 to 1.

        Children count as own once they have ended, and while they run if they are still there.
        """
        elapsed_s = (time.monotonic() - self._began_at) * (os.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return min(1.0, max(0.0, others_s / elapsed_s)) if elapsed_s > 0 else 0.0


def _busy_s() -> float:
    import psutil  # an extra: only results worth keeping need it

    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    import psutil

    process = psutil.Process()
    total = sum(process.cpu_times()[:4])  # with those of children that ended
    for child in process.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue
    return float(total)


def reason_to_refuse(num_rounds: int, busy_share: float) -> str | None:
    """Return why a result is not worth keeping, in words; ``None`` if it is."""
    if num_rounds < LEAST_ROUNDS:
        return f"{num_rounds} rounds, and a result needs at least {LEAST_ROUNDS}"
    return reason_if_busy(busy_share)


def reason_if_busy(busy_share: float) -> str | None:
    """Return why a result of one run is not worth keeping, in words; ``None`` if the machine had no other work."""
    if busy_share > MOST_BUSY:
        return (
            f"other processes took {busy_share:.0%} of the machine meanwhile, and a result allows {MOST_BUSY:.0%}: "
            "run it on a quiet machine"
        )
    return None
