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
from manylora.core.options import CheckedOptions, option
from manylora.lab.workloads.arrivals import (
    LEAST_SHAPE,
    Arrived,
    Extent,
    GammaArrivals,
    WeibullArrivals,
    cov_option,
    rate_option,
)
from manylora.lab.workloads.traces.services import (
    WINDOW_S,
    read_calls_per_minute,
    read_client_windows,
    read_single_calls,
)
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = ["CALLERS", "AzureFunctions2019", "AzureFunctions2021", "GammaCallers", "ServeGenClients"]


def _in_order(times: FloatArray, callers: IntArray, num_callers: int, extent: Extent) -> Arrived:
    order = np.argsort(times, kind="stable")
    kept = extent.cut(times[order])
    return Arrived(kept, callers[order][: len(kept)], num_callers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaCallers(CheckedOptions):
    """Callers with independent gamma-distributed gaps, all of one rate and one irregularity."""

    kind: ClassVar[str] = "gamma-callers"
    rate: float = rate_option(help="Mean of each.")
    cov: float = cov_option(help="Coefficient of variation of the gaps, as for ``GammaArrivals``.")
    num_callers: int = option(at_least=1, help="Number of callers.")

    def arrive(self, extent: Extent, rng: np.random.Generator) -> Arrived:
        """Return the arrivals within an extent; one without duration begins at a request of some caller."""
        each = GammaArrivals(rate=self.rate, cov=self.cov)
        streams = rng.spawn(self.num_callers)
        times = [each.arrive(extent, stream).times for stream in streams]
        if extent.duration_s is None:  # where one caller's gap is whole, those of the others are under way
            renewed = int(rng.integers(self.num_callers))
            for number, stream in enumerate(streams):
                if number != renewed:
                    times[number] += each.draw_first(stream) - times[number][0]
        callers = np.repeat(np.arange(self.num_callers), [len(one) for one in times])
        return _in_order(np.concatenate(times), callers, self.num_callers, extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureFunctions2019(CheckedOptions):
    """Calls of a day's counts per minute, spread evenly at random inside each minute.

    With a rate, counts become Poisson around their scaled selves.
    """

    kind: ClassVar[str] = "azure-functions-2019"
    file: Path
    rate: float | None = rate_option(None, help="Mean over the window; as recorded when ``None``.")
    minute_s: float = option(60.0, above=0, unit="s", help="Time that a recorded minute is played in.")
    start_minute: int = option(0, at_least=0, help="First minute of the window.")
    num_minutes: int | None = option(None, at_least=1, help="Minutes in it; all that follow when ``None``.")

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
class AzureFunctions2021(CheckedOptions):
    """Single calls at their recorded times, stretched to a rate."""

    kind: ClassVar[str] = "azure-functions-2021"
    file: Path
    rate: float | None = rate_option(None, help="Mean; as recorded when ``None``.")

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
class ServeGenClients(CheckedOptions):
    """Clients of one production model, each window with its own rate and burstiness.

    Scaling to a rate divides all gaps by the same factor, so that the burstiness of each client stays.
    """

    kind: ClassVar[str] = "servegen"
    file: Path = option(help="`servegen_oneday_trace.csv.gz`.")
    model: str = option(help="The model of the clients: `m-large`, `m-mid`, `m-small` or `deepseek-r1`.")
    rate: float | None = rate_option(None, help="Mean over the window, all clients; as recorded when ``None``.")
    start_s: float | None = option(None, unit="s", help="Beginning of the window on the trace's clock.")
    window_s: float = option(WINDOW_S, above=0, unit="s", help="Time that a recorded ten-minute window is played in.")

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
                process = WeibullArrivals(rate=one.rate * factor, shape=max(one.shape, LEAST_SHAPE))
            came = process.arrive(window, rng).times
            times.append(came + (one.start_s - start_s) / speed)
            callers.append(np.full(len(came), clients[one.client], dtype=np.int64))
        return _in_order(np.concatenate(times), np.concatenate(callers), len(clients), extent)


CALLERS = (AzureFunctions2019, AzureFunctions2021, GammaCallers, ServeGenClients)
