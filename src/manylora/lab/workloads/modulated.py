"""Arrivals whose rate changes: by chance, in bursts and silences, or in steps that are given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.workloads.arrivals import Arrived, Extent, PoissonArrivals, check_rate, need_end
from manylora.lab.workloads.workload import FloatArray

__all__ = ["OnOffArrivals", "StepArrivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOffArrivals:
    """Silence and bursts: Poisson while on, nothing while off; both last exponentially long.

    Args:
        rate: Mean requests per second over both.
        on_s: Mean seconds of a burst.
        off_s: Mean seconds of a silence.
    """

    kind: ClassVar[str] = "on-off"
    rate: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not (self.on_s > 0 and self.off_s > 0):
            raise ConfigError(f"Got on_s = {self.on_s!r}, off_s = {self.off_s!r}, expected both above 0 seconds")

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        need_end(extent, self.kind)
        share_on = self.on_s / (self.on_s + self.off_s)
        # Time that passes while on is a Poisson process; silences are inserted where bursts end.
        inside = PoissonArrivals(rate=self.rate / share_on).arrive(
            Extent(num_requests=extent.num_requests, duration_s=extent.duration_s), rng
        )
        starts_off = rng.random() >= share_on
        busy_s = float(inside.times[-1]) if len(inside.times) else 0.0
        bursts: list[FloatArray] = []
        while sum(float(part.sum()) for part in bursts) <= busy_s:
            bursts.append(rng.exponential(self.on_s, max(16, math.ceil(busy_s / self.on_s))))
        ends = np.cumsum(np.concatenate(bursts))
        silences = np.concatenate([[0.0], np.cumsum(rng.exponential(self.off_s, len(ends)))])
        lead_s = float(rng.exponential(self.off_s)) if starts_off else 0.0
        times = inside.times + silences[np.searchsorted(ends, inside.times, side="right")] + lead_s
        return Arrived(extent.cut(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrivals:
    """Poisson with a rate that changes in steps, over and over: a day, or a spike.

    Args:
        rates: Requests per second, step by step; 0 is silence.
        step_s: Seconds of each.
    """

    kind: ClassVar[str] = "steps"
    rates: tuple[float, ...]
    step_s: float

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) < 0 or not 0 < sum(self.rates) < math.inf:
            raise ConfigError(f"Got rates = {self.rates!r}, expected numbers from 0, not all of them 0")
        require(self.step_s > 0, "step_s", self.step_s, "above 0 seconds")

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        need_end(extent, self.kind)
        # A unit Poisson process, its time stretched by the inverse of the expected number of arrivals.
        expected = np.concatenate([[0.0], np.cumsum(np.asarray(self.rates) * self.step_s)])
        cycle, cycle_s = float(expected[-1]), self.step_s * len(self.rates)
        due: float | None = None
        if extent.duration_s is not None:
            whole, rest_s = divmod(extent.duration_s, cycle_s)
            due = whole * cycle + float(np.interp(rest_s, self.step_s * np.arange(len(expected)), expected))
            if due == 0:  # nothing but silence
                return Arrived(np.empty(0))
        due_extent = Extent(num_requests=extent.num_requests, duration_s=due)
        unit_times = PoissonArrivals(rate=1.0).arrive(due_extent, rng).times
        cycles, rest = np.divmod(unit_times, cycle)
        step = np.searchsorted(expected, rest, side="right") - 1
        within_s = (rest - expected[step]) / np.asarray(self.rates)[step]
        return Arrived(extent.cut(cycles * cycle_s + step * self.step_s + within_s))
