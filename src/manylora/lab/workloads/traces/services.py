"""Traces of services: serverless functions, clients of production language models, and adapters of image generation.

*Azure Functions* (2019: counts per minute; 2021: single calls): papers on serving adapters replay them with a function
for an adapter (dLoRA, OSDI '24). Functions are of steeper popularity than real adapters: Zipf exponents of 1.2 to 1.9
against 0.92. *ServeGen* (Alibaba, arXiv 2505.09999): clients in windows of ten minutes; a client is the nearest public
analogue of one adapter for one tenant. *GenTD26* (``cluster-trace-v2026-GenAI``, Alibaba): production requests with
LoRA adapters. Popularity of adapters and sessions carry over to text as an assumption; it has no token lengths.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads.traces.rows import header_of, read_csv
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = [
    "WINDOW_S",
    "Calls",
    "ClientWindow",
    "read_adapter_order",
    "read_adapter_uses",
    "read_calls_per_minute",
    "read_client_windows",
    "read_single_calls",
    "read_stack_distances",
]

WINDOW_S = 600.0  # seconds of a window of ServeGen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calls:
    """Single calls in order of arrival."""

    arrival_s: FloatArray  # seconds since the first
    function: IntArray  # which function, numbered in order of appearance


@lru_cache(maxsize=2)
def read_calls_per_minute(file: Path) -> IntArray:
    """Return calls per function and minute of a 2019 file, shaped (functions, minutes).

    Two layouts are known: `minute_1`... with the hashes before them, and the original `1`... with a trigger.
    """
    names = header_of(file).split(",")
    minutes = [name for name in names if name.removeprefix("minute_").isdigit()]
    if not minutes or "HashFunction" not in names:
        raise ConfigError(f"{file}, line 1: expected HashFunction and a column per minute, got {', '.join(names[:8])}")
    counts = [[row.whole(minute) for minute in minutes] for row in read_csv(file, minutes)]
    if not any(map(any, counts)):
        raise ConfigError(f"{file}: expected at least one call, got none")
    return np.asarray(counts, dtype=np.int64)


@lru_cache(maxsize=2)
def read_single_calls(file: Path) -> Calls:
    """Read a 2021 file; a call arrived when it ended less its duration."""
    functions: dict[tuple[str, str], int] = {}
    calls: list[tuple[float, tuple[str, str]]] = []
    for row in read_csv(file, ("app", "func", "end_timestamp", "duration")):
        started_at = row.number("end_timestamp") - row.number("duration", least=0)
        calls.append((started_at, (row.text("app"), row.text("func"))))
    if not calls:
        raise ConfigError(f"{file}: expected at least one call, got none")
    calls.sort(key=lambda call: call[0])
    arrival_s = np.asarray([call[0] for call in calls])
    return Calls(
        arrival_s=arrival_s - arrival_s[0],
        function=np.asarray([functions.setdefault(call[1], len(functions)) for call in calls], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """One client in one window."""

    model: str  # the model it asked
    client: int
    start_s: float  # beginning of the window, in seconds since the trace's midnight
    rate: float  # mean requests per second
    pattern: Literal["gamma", "weibull"]  # the distribution that was fitted to the gaps
    shape: float  # the fit's shape


@lru_cache(maxsize=2)
def read_client_windows(file: Path) -> tuple[ClientWindow, ...]:
    """Read `servegen_oneday_trace.csv.gz`."""
    columns = ("model", "client_id", "timestamp", "rate", "pattern", "arg1")
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
                pattern="gamma" if pattern == "Gamma" else "weibull",
                shape=row.number("arg1", least=0),
            )
        )
    if not windows:
        raise ConfigError(f"{file}: expected at least one window, got none")
    return tuple(windows)


@lru_cache(maxsize=2)
def read_adapter_order(file: Path) -> IntArray:
    """Return the adapter of every use of `gentd26_data_trace_processed.csv.gz`, in order, numbered by first use.

    A request with several adapters is as many uses.
    """
    numbers: dict[str, int] = {}
    uses: list[int] = []
    for row in read_csv(file, ("lora_args",)):
        text = row.text("lora_args")
        if text == "[]":
            continue
        try:  # a text that is nested deeply is a MemoryError or a RecursionError
            names = [str(one["modelVersionId"]) for one in ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
            raise row.wrong("lora_args", "a list of dicts with 'modelVersionId'") from None
        uses += [numbers.setdefault(name, len(numbers)) for name in names]
    if not uses:
        raise ConfigError(f"{file}: expected at least one use of an adapter, got none")
    return np.asarray(uses, dtype=np.int64)


def read_adapter_uses(file: Path, column: str = "uses_all_68195_rows") -> IntArray:
    """Return how often each adapter of `gentd26_lora_popularity.csv` was used, in the file's order."""
    uses = [row.whole(column) for row in read_csv(file, ("adapter_id", column))]
    if not sum(uses):
        raise ConfigError(f"{file}, column {column!r}: expected at least one use, got none")
    return np.asarray(uses, dtype=np.int64)


def read_stack_distances(file: Path, column: str = "lru_hit_all") -> tuple[IntArray, FloatArray]:
    """Return cache sizes and LRU hit rates of `gentd26_lora_lru_stack_distance.csv`, both rising."""
    slots: list[int] = []
    rates: list[float] = []
    for row in read_csv(file, ("slots", column)):
        slots.append(row.whole("slots", least=1 + (slots[-1] if slots else 0)))
        rates.append(row.number(column, least=rates[-1] if rates else 0.0))
        if rates[-1] > 1:
            raise row.wrong(column, "a share up to 1")
    if not slots:
        raise ConfigError(f"{file}: expected at least one row, got none")
    return np.asarray(slots, dtype=np.int64), np.asarray(rates)
