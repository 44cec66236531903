"""GenTD26: production requests with LoRA adapters, for image generation (`cluster-trace-v2026-GenAI`, Alibaba).

Adapter popularity, sessions and loading times carry over to text as an assumption; token lengths do not exist here.
Its two request files were anonymised apart on purpose: they are read apart and never joined.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads.streams import FloatArray, IntArray
from manylora.lab.workloads.traces.rows import read_csv

__all__ = [
    "ServiceMetric",
    "TimedRequests",
    "read_adapter_order",
    "read_adapter_uses",
    "read_service_metric",
    "read_stack_distances",
    "read_timed_requests",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedRequests:
    """Requests with times and users, without adapter names.

    Args:
        arrival_s: Seconds since the first, to the second.
        user: Who asked, numbered in order of appearance.
        num_loras: Adapters each used.
        exec_s: Seconds of generation; NaN where the trace has none.
    """

    arrival_s: FloatArray
    user: IntArray
    num_loras: IntArray
    exec_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServiceMetric:
    """Samples of one measured quantity over a day.

    Args:
        time_s: When, in seconds since the first.
        value: In the metric's own unit (milliseconds for latencies).
    """

    time_s: FloatArray
    value: FloatArray


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
        try:
            names = [str(one["modelVersionId"]) for one in ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, KeyError):
            raise row.wrong("lora_args", "a list of dicts with 'modelVersionId'") from None
        uses += [numbers.setdefault(name, len(numbers)) for name in names]
    if not uses:
        raise ConfigError(f"{file}: expected at least one use of an adapter, got none")
    return np.asarray(uses, dtype=np.int64)


def read_timed_requests(file: Path) -> TimedRequests:
    """Read `gentd26_lora_request_trace.csv.gz`."""
    users: dict[str, int] = {}
    columns = ("gmt_create", "groupId", "num_lora", "exec_time_seconds")
    times, user, num_loras, exec_s = [], [], [], []
    for row in read_csv(file, columns):
        times.append(row.time_s("gmt_create"))
        user.append(users.setdefault(row.text("groupId"), len(users)))
        num_loras.append(row.whole("num_lora"))
        exec_s.append(row.number("exec_time_seconds") if row.text("exec_time_seconds") else float("nan"))
    if not times:
        raise ConfigError(f"{file}: expected at least one request, got none")
    arrival_s = np.asarray(times)
    order = np.argsort(arrival_s, kind="stable")
    return TimedRequests(
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        user=np.asarray(user, dtype=np.int64)[order],
        num_loras=np.asarray(num_loras, dtype=np.int64)[order],
        exec_s=np.asarray(exec_s)[order],
    )


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


def read_service_metric(file: Path) -> ServiceMetric:
    """Read one of the files of samples (`gentd26_lora_update_latency_anon.csv.gz` and its like), in order of time."""
    samples = [
        (row.number("timestamp_anon"), row.number("value")) for row in read_csv(file, ("timestamp_anon", "value"))
    ]
    if not samples:
        raise ConfigError(f"{file}: expected at least one sample, got none")
    times, values = np.asarray(sorted(samples)).T
    return ServiceMetric(time_s=times - times[0], value=values)
