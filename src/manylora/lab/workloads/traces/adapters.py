"""GenTD26: production requests with LoRA adapters, for image generation (`cluster-trace-v2026-GenAI`, Alibaba).

Popularity of adapters and sessions carry over to text as an assumption; token lengths do not exist here.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads.traces.rows import read_csv
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = ["read_adapter_order", "read_adapter_uses", "read_stack_distances"]


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
