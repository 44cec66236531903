"""Arrivals with callers: serverless functions and clients of production models, each mapped to an adapter.

With fewer adapters than callers, callers are dealt out in turn, as dLoRA (OSDI '24) does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.workloads.arrivals import Arrived, Extent, GammaArrivals, WeibullArrivals
from manylora.lab.workloads.traces.services import (
    WINDOW_S,
    read_calls_per_minute,
    read_client_windows,
    read_single_calls,
)
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = ["AzureFunctions2019", "AzureFunctions2021", "GammaCallers", "ServeGenClients"]


def _in_order(times: FloatArray, callers: IntArray, num_callers: int, extent: Extent) -> Arrived:
    order = np.argsort(times, kind="stable")
    kept = extent.cut(times[order])
    return Arrived(kept, callers[order][: len(kept)], num_callers)


def _check(rate: float | None, **sizes: float) -> None:
    for name, value in (sizes if rate is None else {**sizes, "rate": rate}).items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"Got {name} = {value!r}, expected above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaCallers:
    """Callers with independent gamma-distributed gaps, all of one rate and one irregularity.

    Args:
        rate: Mean requests per second of each.
        cov: Coefficient of variation of the gaps: 1 is Poisson, above it bursts, below it regularity.
    """

    kind: ClassVar[str] = "gamma-callers"
    rate: float
    cov: float
    num_callers: int

    def __post_init__(self) -> None:
        _check(self.rate, cov=self.cov, num_callers=self.num_callers)

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent."""
        each = GammaArrivals(rate=self.rate, cov=self.cov)
        times = [each.arrive(extent, stream).times for stream in rng.spawn(self.num_callers)]
        callers = np.repeat(np.arange(self.num_callers), [len(one) for one in times])
        return _in_order(np.concatenate(times), callers, self.num_callers, extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureFunctions2019:
    """Calls of a day's counts per minute, spread evenly at random inside each minute.

    Args:
        file: A file of counts per minute.
        rate: Mean requests per second over the window: counts become Poisson around their scaled selves. As recorded
            when ``None``.
        minute_s: Seconds that a recorded minute is played in; less than 60 makes the day go faster.
        start_minute: First minute of the window.
        num_minutes: Minutes in it; all that follow when ``None``.
    """

    kind: ClassVar[str] = "azure-functions-2019"
    file: Path
    rate: float | None = None
    minute_s: float = 60.0
    start_minute: int = 0
    num_minutes: int | None = None

    def __post_init__(self) -> None:
        _check(self.rate, minute_s=self.minute_s, num_minutes=1 if self.num_minutes is None else self.num_minutes)
        require(self.start_minute >= 0, "start_minute", self.start_minute, "0 or later")

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent, at most one window of them."""
        end = None if self.num_minutes is None else self.start_minute + self.num_minutes
        counts = read_calls_per_minute(self.file)[:, self.start_minute : end]
        if not counts.sum():
            raise ConfigError(f"{self.file}: no call from minute {self.start_minute} on in the window asked for")
        num_functions, num_minutes = counts.shape
        if self.rate is not None:
            counts = rng.poisson(counts * (self.rate * num_minutes * self.minute_s / counts.sum()))
        functions, minutes = np.indices(counts.shape)
        repeats = counts.ravel()
        minute = np.repeat(minutes.ravel(), repeats)
        times = (minute + rng.random(len(minute))) * self.minute_s
        return _in_order(times, np.repeat(functions.ravel(), repeats), num_functions, extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureFunctions2021:
    """Single calls at their recorded times, stretched to a rate.

    Args:
        file: A file of single calls.
        rate: Mean requests per second; as recorded when ``None``.
    """

    kind: ClassVar[str] = "azure-functions-2021"
    file: Path
    rate: float | None = None

    def __post_init__(self) -> None:
        _check(self.rate)

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent, at most all of the trace."""
        calls = read_single_calls(self.file)
        times = calls.arrival_s
        if self.rate is not None:
            if times[-1] <= 0:
                raise ConfigError(f"{self.file}: expected calls at two times at least, to stretch them to a rate")
            times = times * ((len(times) - 1) / (self.rate * times[-1]))
        return _in_order(times, calls.function, int(calls.function.max()) + 1, extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeGenClients:
    """Clients of one production model, each window with its own rate and burstiness.

    Scaling to a rate divides all gaps by the same factor, so that the burstiness of each client stays.

    Args:
        file: `servegen_oneday_trace.csv.gz`.
        model: The model of the clients: `m-large`, `m-mid`, `m-small` or `deepseek-r1`.
        rate: Mean requests per second over the window, all clients together; as recorded when ``None``.
        start_s: Beginning of the window, in seconds of the trace's clock; its first when ``None``.
        window_s: Seconds that a recorded ten-minute window is played in.
    """

    kind: ClassVar[str] = "servegen"
    file: Path
    model: str
    rate: float | None = None
    start_s: float | None = None
    window_s: float = WINDOW_S

    def __post_init__(self) -> None:
        _check(self.rate, window_s=self.window_s)

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent, at most to the trace's end."""
        everything = read_client_windows(self.file)
        windows = [one for one in everything if one.model == self.model and one.rate > 0]
        if not windows:
            known = sorted({one.model for one in everything})
            raise ConfigError(f"{self.file}: no client of model {self.model!r}, expected one of {', '.join(known)}")
        start_s = min(one.start_s for one in windows) if self.start_s is None else self.start_s
        speed = WINDOW_S / self.window_s
        until_s = math.inf if extent.duration_s is None else start_s + extent.duration_s * speed
        windows = [one for one in windows if start_s <= one.start_s < until_s]
        if not windows:
            raise ConfigError(f"{self.file}: no window of model {self.model!r} from {start_s:g} s on")
        span_s = (max(one.start_s for one in windows) - start_s + WINDOW_S) / speed
        recorded = sum(one.rate for one in windows) * self.window_s / span_s
        factor = 1.0 if self.rate is None else self.rate / recorded
        clients = {client: number for number, client in enumerate(sorted({one.client for one in windows}))}
        times, callers = [], []
        for one in windows:
            window = Extent(duration_s=self.window_s)
            process: GammaArrivals | WeibullArrivals
            if one.pattern == "gamma":
                process = GammaArrivals(rate=one.rate * factor, cov=max(one.shape, 1e-6) ** -0.5)
            else:
                process = WeibullArrivals(rate=one.rate * factor, shape=max(one.shape, 1e-2))
            came = process.arrive(window, rng).times
            times.append(came + (one.start_s - start_s) / speed)
            callers.append(np.full(len(came), clients[one.client], dtype=np.int64))
        return _in_order(np.concatenate(times), np.concatenate(callers), len(clients), extent)
