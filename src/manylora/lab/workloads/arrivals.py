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
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.workloads.traces.requests import read_requests
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = [
    "ArrivalProcess",
    "Arrived",
    "Extent",
    "GammaArrivals",
    "PoissonArrivals",
    "ReplayArrivals",
    "WeibullArrivals",
    "check_rate",
    "need_end",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long a workload is: so many requests, so many seconds, or whichever ends first.

    Args:
        num_requests: Requests at most.
        duration_s: Seconds at most.
    """

    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"Got num_requests = {self.num_requests!r}, expected at least 1")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ConfigError(f"Got duration_s = {self.duration_s!r}, expected above 0 seconds")

    @property
    def is_open(self) -> bool:
        """Whether neither end is set: only a recorded workload ends by itself."""
        return self.num_requests is None and self.duration_s is None

    def cut(self, times: FloatArray) -> FloatArray:
        """Return the leading times that lie inside, given them in order."""
        if self.duration_s is not None:
            times = times[: int(np.searchsorted(times, self.duration_s, side="left"))]
        return times if self.num_requests is None else times[: self.num_requests]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Arrivals, in order.

    Args:
        times: Seconds from the start.
        callers: Caller of each, numbered from 0, in a trace of functions or clients.
        num_callers: All callers, also those without a request.
    """

    times: FloatArray
    callers: IntArray | None = None
    num_callers: int = 0


class ArrivalProcess(Protocol):
    """A process of arrival times."""

    kind: ClassVar[str]

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        ...


def check_rate(rate: float) -> None:
    """Raise a ``ConfigError`` unless the rate is positive and finite."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"Got rate = {rate!r}, expected requests per second above 0")


def need_end(extent: Extent, kind: str) -> None:
    """Raise a ``ConfigError`` if arrivals of a kind that never ends would have none."""
    if extent.is_open:
        raise ConfigError(f"Got neither num_requests nor duration_s, but {kind!r} arrivals have no end of their own")


class _RenewalProcess(ABC):
    """A process with independent gaps, of ``rate`` arrivals per second on average, without an end of its own."""

    __slots__ = ()
    kind: ClassVar[str]
    rate: float

    @abstractmethod
    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""

    @abstractmethod
    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap under way at time 0, for extents with a duration."""

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        need_end(extent, self.kind)
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
    """Independent users: exponential gaps.

    Args:
        rate: Mean requests per second.
    """

    kind: ClassVar[str] = "poisson"
    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""
        return rng.exponential(1 / self.rate, num)

    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap under way at time 0."""
        return float(rng.exponential(1 / self.rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals(_RenewalProcess):
    """Gamma-distributed gaps: 1 is Poisson, above it bursts, below it regularity.

    Args:
        rate: Mean requests per second.
        cov: Coefficient of variation of the gaps, their standard deviation over their mean.
    """

    kind: ClassVar[str] = "gamma"
    rate: float
    cov: float

    def __post_init__(self) -> None:
        check_rate(self.rate)
        require(self.cov > 0, "cov", self.cov, "above 0")

    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""
        shape = 1 / self.cov**2
        return rng.gamma(shape, 1 / (self.rate * shape), num)

    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap at time 0: drawn in proportion to its length, and time 0 lies anywhere in it."""
        shape = 1 / self.cov**2
        return float(rng.gamma(shape + 1, 1 / (self.rate * shape)) * rng.random())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeibullArrivals(_RenewalProcess):
    """Weibull-distributed gaps, the other distribution that is fitted to production clients.

    Args:
        rate: Mean requests per second.
        shape: 1 is Poisson, below it bursts.
    """

    kind: ClassVar[str] = "weibull"
    rate: float
    shape: float

    def __post_init__(self) -> None:
        check_rate(self.rate)
        require(self.shape > 0, "shape", self.shape, "above 0")

    @property
    def _scale_s(self) -> float:
        return 1 / (self.rate * math.gamma(1 + 1 / self.shape))

    def draw_gaps(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` gaps, in seconds."""
        return self._scale_s * rng.weibull(self.shape, num)

    def draw_first(self, rng: np.random.Generator) -> float:
        """Return the rest of the gap at time 0: drawn in proportion to its length, and time 0 lies anywhere in it."""
        power = 1 / self.shape
        return float(self._scale_s * rng.gamma(1 + power) ** power * rng.random())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayArrivals:
    """The times of a trace, as recorded or stretched to a rate; past its end it begins again.

    Args:
        file: A trace with times: Azure LLM or Mooncake requests.
        rate: Mean requests per second to stretch to; as recorded when ``None``.
    """

    kind: ClassVar[str] = "replay"
    file: Path
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_rate(self.rate)

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
