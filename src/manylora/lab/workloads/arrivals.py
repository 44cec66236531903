"""Arrival processes: times of requests, in seconds from the start of the workload.

A process that is watched for a while starts with a gap already under way: long gaps are more likely to be met, and
part of it is over. With a duration, processes here start that way (in the *equilibrium* of their gaps), so that
``rate`` times the duration is the expected number of arrivals, however bursty they are and however short it is. With a
number of requests and no duration they start with a whole gap, so that the last one is expected after the number over
``rate``. Gaps are never clipped: cutting the long ones off would make the process run hot.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, check_options, option
from manylora.lab.workloads.traces.requests import read_requests
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = [
    "ARRIVALS",
    "LEAST_SHAPE",
    "ArrivalProcess",
    "Arrived",
    "Extent",
    "GammaArrivals",
    "OnOffArrivals",
    "PoissonArrivals",
    "ReplayArrivals",
    "StepArrivals",
    "WeibullArrivals",
    "cov_option",
    "rate_option",
]

rate_option = partial(option, above=0, unit="requests per second")  # makes the option of a rate
cov_option = partial(option, at_least=1e-6, at_most=1e6)  # makes the option of a coefficient of variation

LEAST_SHAPE = 1e-2  # of Weibull's distribution, whose mean is beyond any number at a two-hundredth


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long a workload is: so many requests, so many seconds, or whichever ends first."""

    num_requests: int | None = None
    duration_s: float | None = None

    def cut(self, times: FloatArray) -> FloatArray:
        """Return the leading times that lie inside, given them in order."""
        if self.duration_s is not None:
            times = times[: int(np.searchsorted(times, self.duration_s, side="left"))]
        return times if self.num_requests is None else times[: self.num_requests]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Arrivals, in order."""

    times: FloatArray  # seconds from the start
    callers: IntArray | None = None  # caller of each, numbered from 0, in a trace of functions or clients
    num_callers: int = 0  # all callers, also those without a request


class ArrivalProcess(Protocol):
    """A process of arrival times."""

    kind: ClassVar[str]

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        ...


def _need_end(extent: Extent, kind: str) -> None:
    """Raise a ``ConfigError`` if arrivals of a kind that never ends would have none: only a recorded workload ends."""
    if extent.num_requests is None and extent.duration_s is None:
        raise ConfigError(f"Got neither num_requests nor duration_s, but {kind!r} arrivals have no end of their own")


class _RenewalProcess(CheckedOptions, ABC):
    """A process with independent gaps, of ``rate`` arrivals per second on average, without an end of its own."""

    __slots__ = ()
    kind: ClassVar[str]
    rate: float

    @abstractmethod
    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""

    @abstractmethod
    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap under way at time 0, for extents with a duration.

        It is drawn in proportion to its length, and time 0 lies anywhere in it.
        """

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        _need_end(extent, self.kind)
        chunk, most = extent.num_requests or 0, extent.num_requests or math.inf
        if extent.duration_s is None:
            return Arrived(extent.cut(np.cumsum(self.draw_gaps(chunk, rng))))
        expected = self.rate * extent.duration_s
        enough = math.ceil(expected + 6 * math.sqrt(expected) + 16)
        chunk = min(chunk, enough) if chunk else enough
        times = np.cumsum(np.concatenate([[self.draw_first(rng)], self.draw_gaps(chunk, rng)]))
        while times[-1] < extent.duration_s and len(times) <= most:
            times = np.concatenate([times, times[-1] + np.cumsum(self.draw_gaps(chunk, rng))])
        return Arrived(extent.cut(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonArrivals(_RenewalProcess):
    """Independent users: exponential gaps."""

    kind: ClassVar[str] = "poisson"
    rate: float = rate_option(help="Mean.")

    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""
        return rng.exponential(1 / self.rate, num)

    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap under way at time 0."""
        return float(rng.exponential(1 / self.rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals(_RenewalProcess):
    """Gamma-distributed gaps: 1 is Poisson, above it bursts, below it regularity."""

    kind: ClassVar[str] = "gamma"
    rate: float = rate_option(help="Mean.")
    cov: float = cov_option(help="Coefficient of variation of the gaps: standard deviation over mean.")

    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""
        shape = 1 / self.cov**2
        return rng.gamma(shape, 1 / (self.rate * shape), num)

    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap under way at time 0."""
        shape = 1 / self.cov**2
        return float(rng.gamma(shape + 1, 1 / (self.rate * shape)) * rng.random())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeibullArrivals(_RenewalProcess):
    """Weibull-distributed gaps, the other distribution that is fitted to production clients."""

    kind: ClassVar[str] = "weibull"
    rate: float = rate_option(help="Mean.")
    shape: float = option(at_least=LEAST_SHAPE, at_most=1e6, help="1 is Poisson, below it bursts.")

    @property
    def _scale_s(self) -> float:
        return 1 / (self.rate * math.gamma(1 + 1 / self.shape))

    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""
        return self._scale_s * rng.weibull(self.shape, num)

    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap under way at time 0."""
        power = 1 / self.shape
        return float(self._scale_s * rng.gamma(1 + power) ** power * rng.random())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayArrivals(CheckedOptions):
    """The times of a trace, as recorded or stretched to a rate; past its end it begins again."""

    kind: ClassVar[str] = "replay"
    file: Path = option(help="A trace with times: Azure LLM or Mooncake requests.")
    rate: float | None = rate_option(None, help="Mean to stretch to; as recorded when ``None``.")

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent; all of the trace, once, within an open one."""
        recorded = read_requests(self.file).arrival_s
        if recorded is None or len(recorded) < 2 or recorded[-1] <= recorded[0]:
            raise ConfigError(f"{self.file}: expected a trace of arrivals at two times at least")
        times = recorded - recorded[0]
        period_s = float(times[-1]) * len(times) / (len(times) - 1)  # one mean gap before it begins again
        if self.rate is not None:
            stretch = len(times) / (self.rate * period_s)
            times, period_s = times * stretch, period_s * stretch
        rounds = 1
        if extent.num_requests is not None:
            rounds = math.ceil(extent.num_requests / len(times))
        if extent.duration_s is not None:
            by_time = math.ceil(extent.duration_s / period_s)
            rounds = by_time if extent.num_requests is None else min(rounds, by_time)
        repeated = (period_s * np.arange(rounds)[:, None] + times[None, :]).ravel()
        return Arrived(extent.cut(repeated))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOffArrivals(CheckedOptions):
    """Silence and bursts: Poisson while on, nothing while off; both last exponentially long."""

    kind: ClassVar[str] = "on-off"
    rate: float = rate_option(help="Mean over both.")
    on_s: float = option(above=0, unit="s", help="Mean length of a burst.")
    off_s: float = option(above=0, unit="s", help="Mean length of a silence.")

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        _need_end(extent, self.kind)
        share_on = self.on_s / (self.on_s + self.off_s)
        # Time that passes while on is a Poisson process; silences are inserted where bursts end.
        inside = PoissonArrivals(rate=self.rate / share_on).arrive(extent, rng)
        # Of a number of requests the first gap is whole: it begins at a request, and so in a burst.
        starts_off = rng.random() >= share_on and extent.duration_s is not None
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
    """Poisson with a rate that changes in steps, over and over: a day, or a spike."""

    kind: ClassVar[str] = "steps"
    rates: tuple[float, ...] = option(help="Requests per second, step by step; 0 is silence.")
    step_s: float = option(above=0, unit="s", help="Length of each step.")

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) < 0 or not 0 < sum(self.rates) < math.inf:
            raise ConfigError(f"Got rates = {self.rates!r}, expected numbers from 0, not all of them 0")
        check_options(self)

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        _need_end(extent, self.kind)
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


ARRIVALS = (GammaArrivals, OnOffArrivals, PoissonArrivals, ReplayArrivals, StepArrivals, WeibullArrivals)
