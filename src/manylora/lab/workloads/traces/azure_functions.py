"""Azure Functions: calls of serverless functions (2019: counts per minute; 2021: single calls).

Papers on serving adapters replay them with a function for an adapter (dLoRA, OSDI '24). Their popularity is steeper
than that of real adapters: Zipf exponents of 1.2 to 1.9 against 0.92.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads.streams import FloatArray, IntArray
from manylora.lab.workloads.traces.rows import header_of, read_csv

__all__ = ["Calls", "read_calls_per_minute", "read_single_calls"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calls:
    """Single calls in order of arrival.

    Args:
        arrival_s: Seconds since the first.
        function: Which function, numbered in order of appearance.
        duration_s: Duration of each call.
    """

    arrival_s: FloatArray
    function: IntArray
    duration_s: FloatArray


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
    calls: list[tuple[float, float, tuple[str, str]]] = []
    for row in read_csv(file, ("app", "func", "end_timestamp", "duration")):
        duration_s = row.number("duration", least=0)
        calls.append((row.number("end_timestamp") - duration_s, duration_s, (row.text("app"), row.text("func"))))
    if not calls:
        raise ConfigError(f"{file}: expected at least one call, got none")
    calls.sort(key=lambda call: call[0])
    arrival_s = np.asarray([call[0] for call in calls])
    return Calls(
        arrival_s=arrival_s - arrival_s[0],
        function=np.asarray([functions.setdefault(call[2], len(functions)) for call in calls], dtype=np.int64),
        duration_s=np.asarray([call[1] for call in calls]),
    )
