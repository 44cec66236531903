"""The one statistic of comparisons by time: the ratio of each round, its median, and an interval by bootstrap.

The sides take turns within a round, so that both meet the machine at the same speed, and the order rotates, so that
none always runs first. A ratio is taken within a round; over the rounds it has a median. The interval is of the
median under resampling of rounds: it says how far this run of the benchmark is to be trusted, not how machines differ.
Ratios of medians, means and best-of times are not used anywhere.

A figure means something beside the machine that it was measured on: `machine`.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

__all__ = ["Ratio", "in_turns", "machine", "median_interval", "ratio_by_round", "time_in_turns"]

RESAMPLES = 10_000
COVERED = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over the rounds, taken within each."""

    median: float  # median of the rounds
    low: float  # lower end of the interval for the median
    high: float  # upper end
    rounds: tuple[float, ...]  # the ratio of each round

    def verdict(self, most: float) -> str:
        """Return whether a goal of at most ``most`` is met or missed by the whole interval, else ``open``."""
        return "met" if self.high <= most else "missed" if self.low > most else "open"

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_by_round(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the ratio of two series of the same rounds, with a 95 % interval of its median."""
    ratios = [one / other for one, other in zip(numerators, denominators, strict=True)]
    return Ratio(*median_interval(ratios), tuple(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of rounds, and both ends of its 95 % interval.

    The resampling is seeded, so that a table can be made again from its figures.
    """
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = 100 * (1 - COVERED) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return statistics.median(values), float(low), float(high)


def in_turns(names: Sequence[str], num_rounds: int, *, num_warm_up: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the number of the round and the name of the side whose turn it is.

    Rounds to warm up have negative numbers; every round begins with another side.
    """
    for number in range(-num_warm_up, num_rounds):
        first = max(0, number) % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def time_in_turns(
    systems: Mapping[str, Callable[[], object]],
    num_rounds: int,
    on_round: Callable[[str, int, float], None] = lambda name, number, seconds: None,
) -> dict[str, list[float]]:
    """Return the seconds of every system in every round, after one round that warms up and does not count.

    ``on_round`` is called after each with the system, the number of the round (-1 does not count) and its seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number, name in in_turns(list(systems), num_rounds):
        began = time.perf_counter()
        systems[name]()
        took = time.perf_counter() - began
        on_round(name, number, took)
        if number >= 0:
            seconds[name].append(took)
    return seconds


def machine() -> dict[str, str | int]:
    """Return the processor, its cores, and the versions that matter to speed."""
    versions: dict[str, str | int] = {"python": platform.python_version()}
    for package in ("torch", "numba", "uvicorn", "uvloop", "httptools"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"cpu": _cpu_name(), "cores": os.cpu_count() or 1, **versions}


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
