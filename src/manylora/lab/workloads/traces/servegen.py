"""ServeGen: clients of production language models, in windows of ten minutes (Alibaba, arXiv 2505.09999).

A client is the nearest public analogue of one adapter for one tenant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads.streams import FloatArray
from manylora.lab.workloads.traces.rows import read_csv

__all__ = [
    "WINDOW_S",
    "ClientSummary",
    "ClientWindow",
    "read_client_hours",
    "read_client_summaries",
    "read_client_windows",
]

WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """One client in one window.

    Args:
        model: The model it asked.
        client: Its number there.
        start_s: Beginning of the window, in seconds since the trace's midnight.
        rate: Mean requests per second.
        cov: Coefficient of variation of the gaps.
        pattern: The distribution that was fitted to the gaps.
        shape: The fit's shape.
        scale_s: The fit's scale, in seconds.
    """

    model: str
    client: int
    start_s: float
    rate: float
    cov: float
    pattern: Literal["gamma", "weibull"]
    shape: float
    scale_s: float


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """One client over the whole trace.

    Args:
        model: The model it asked.
        client: Its number there.
        requests: Number of its requests.
        mean_rate: Mean requests per second.
        peak_rate: The same in its busiest window.
        mean_prompt_tokens: Where lengths are known.
        mean_output_tokens: Where lengths are known.
    """

    model: str
    client: int
    requests: int
    mean_rate: float
    peak_rate: float
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None


@lru_cache(maxsize=2)
def read_client_windows(file: Path) -> tuple[ClientWindow, ...]:
    """Read `servegen_oneday_trace.csv.gz`."""
    columns = ("model", "client_id", "timestamp", "rate", "cv", "pattern", "arg1", "arg2")
    windows: list[ClientWindow] = []
    for row in read_csv(file, columns):
        pattern = row.text("pattern")
        if pattern not in ("Gamma", "Weibull"):
            raise row.wrong("pattern", "Gamma or Weibull")
        windows.append(
            ClientWindow(
                model=row.text("model"),
                client=row.whole("client_id"),
                start_s=row.number("timestamp", least=0),
                rate=row.number("rate", least=0),
                cov=row.number("cv", least=0),
                pattern="gamma" if pattern == "Gamma" else "weibull",
                shape=row.number("arg1", least=0),
                scale_s=row.number("arg2", least=0),
            )
        )
    if not windows:
        raise ConfigError(f"{file}: expected at least one window, got none")
    return tuple(windows)


def read_client_summaries(file: Path) -> tuple[ClientSummary, ...]:
    """Read `servegen_client_summary.csv`."""
    columns = ("model", "client_id", "requests", "mean_rate_rps", "peak_rate_rps", "mean_input_tokens")
    return tuple(
        ClientSummary(
            model=row.text("model"),
            client=row.whole("client_id"),
            requests=row.whole("requests"),
            mean_rate=row.number("mean_rate_rps", least=0),
            peak_rate=row.number("peak_rate_rps", least=0),
            mean_prompt_tokens=row.number("mean_input_tokens") if row.text("mean_input_tokens") else None,
            mean_output_tokens=row.number("mean_output_tokens") if row.text("mean_output_tokens") else None,
        )
        for row in read_csv(file, (*columns, "mean_output_tokens"))
    )


def read_client_hours(file: Path, model: str) -> FloatArray:
    """Return mean requests per second of `servegen_client_hourly_rate.csv.gz`, shaped (clients, hours)."""
    cells: list[tuple[int, int, float]] = list(_hours(file, model))
    if not cells:
        raise ConfigError(f"{file}: no client of model {model!r}")
    rates = np.zeros((1 + max(cell[0] for cell in cells), 1 + max(cell[1] for cell in cells)))
    for client, hour, rate in cells:
        rates[client, hour] = rate
    return rates


def _hours(file: Path, model: str) -> Iterator[tuple[int, int, float]]:
    for row in read_csv(file, ("model", "client_id", "hour", "mean_rate_rps")):
        if row.text("model") == model:
            yield row.whole("client_id"), row.whole("hour"), row.number("mean_rate_rps", least=0)
