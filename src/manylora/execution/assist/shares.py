"""A core's time for rows of an adapter, measured on this machine; ``core/costs/shares.py`` divides a step by it.

It is measured once for each class of (inputs, outputs, rank, type), when the first adapter of that class is copied to
the device, on a thread of its own: a measurement takes tens of milliseconds, for which no step and no copy must wait. A
step before that takes a guess. The rank counts as its next power of two.

A step reads every weight of an adapter once, from memory that no cache holds, and so does each call of a measurement.
In a cache they would be read four to seven times as fast, and too many cores would share a step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence

import torch

from manylora.core.adapters.layout import AdapterLayout, GroupLayout, ModuleLayout, Tile
from manylora.core.adapters.shape import ELEMENT_BYTES, ModuleKind, TargetModule
from manylora.core.costs.shares import HANDOFF_S, RowCost, row_cost
from manylora.execution.kernels.cpu.openmp import point_to
from manylora.execution.kernels.cpu.products import make_group_tables
from manylora.execution.storage.resident import AdapterMemory

__all__ = ["adapter_cost", "measure_classes", "time_rows"]

PROBE_ROWS = (16, 64)
ROUNDS = 3

PROBE_BYTES = 1 << 27
"""Memory of a probe's weights: more than most last-level caches hold, so that the first of them are in none."""

_Class = tuple[int, int, int, str]

_measured: dict[_Class, RowCost] = {}


def measure_classes(groups: Iterable[GroupLayout], dtype: str) -> None:
    """Measure the classes of these groups that are not known yet; takes tens of milliseconds for each."""
    for of_group in {_class_of(group, dtype): None for group in groups}:
        if of_group not in _measured:
            _measured[of_group] = _measure(*of_group)


def adapter_cost(groups: Iterable[GroupLayout], dtype: str) -> RowCost:
    """Return the cost of an adapter's rows in all these groups of a step; guesses what was not measured."""
    classes = [_class_of(group, dtype) for group in groups]
    costs = [_measured.get(of_group) or _guess(*of_group) for of_group in classes]
    fixed_s, row_s = sum(cost.fixed_s for cost in costs), sum(cost.row_s for cost in costs)
    return RowCost(fixed_s, row_s, HANDOFF_S * len(costs))


def time_rows(
    inputs: int, outputs: int, rank: int, dtype: str, counts: Sequence[int], num_bytes: int = PROBE_BYTES
) -> list[float]:
    """Return a core's time for each number of rows, in seconds, with weights that no cache holds.

    Args:
        inputs: Inputs of a module.
        outputs: Its outputs.
        rank: The adapter's.
        dtype: Type of its weights.
        counts: Numbers of rows, each timed by one call, with weights that no call has read for ``num_bytes``.
        num_bytes: Memory of all weights, or of one call's if that is more; 0 for calls that share theirs, in a cache.
    """
    layout = _layout(inputs, outputs, rank, dtype)
    num_probes = max(1, -(-num_bytes // layout.weight_bytes))
    weights = torch.full((num_probes, layout.used_elements), 0.01, dtype=getattr(torch, dtype))
    return [_time(AdapterMemory(layout, weights, (n % num_probes,)), rows) for n, rows in enumerate(counts)]


def _class_of(group: GroupLayout, dtype: str) -> _Class:
    """Return inputs, outputs, rank and type of one module with the work of the group."""
    work = sum(part.rank * part.module.out_features for part in group.modules)
    return group.in_features, max(1, work // group.rank), 1 << (group.rank - 1).bit_length(), dtype


def _guess(inputs: int, outputs: int, rank: int, dtype: str) -> RowCost:
    return row_cost(rank * (inputs + outputs), ELEMENT_BYTES[dtype])


def _measure(inputs: int, outputs: int, rank: int, dtype: str) -> RowCost:
    took = time_rows(inputs, outputs, rank, dtype, PROBE_ROWS * ROUNDS)
    few, many = PROBE_ROWS
    few_s, many_s = (min(took[number :: len(PROBE_ROWS)]) for number in range(len(PROBE_ROWS)))
    row_s = max((many_s - few_s) / (many - few), many_s / many / 4)
    return RowCost(max(0.0, many_s - many * row_s), row_s)


def _layout(inputs: int, outputs: int, rank: int, dtype: str) -> AdapterLayout:
    """Return the layout of an adapter on one module, in one page."""
    num_a, num_b = rank * inputs, rank * outputs
    module = TargetModule(
        name="probe",
        kind=ModuleKind.LINEAR,
        in_features=inputs,
        out_features=outputs,
        layer=None,
        group="probe",
        offset=0,
    )
    b = ModuleLayout(module, rank, 0, (Tile(0, num_a, 0, rank, 0, outputs),))
    group = GroupLayout("probe", rank, inputs, (Tile(0, 0, 0, rank, 0, inputs),), (b,), 1)
    return AdapterLayout({"probe": group}, 1, num_a + num_b, dtype)


def _time(memory: AdapterMemory, num_rows: int) -> float:
    """Return the time of the kernels that a worker runs for rows of an adapter; they are compiled before."""
    (group,) = memory.layout.groups.values()
    x = torch.full((num_rows, group.in_features), 0.01)
    out = torch.full((num_rows, group.modules[0].module.out_features), 0.0)  # written: its pages are there
    calls = make_group_tables([(0, num_rows, memory)], ["probe"])["probe"].calls(x, out, 1)
    prepared = [(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel), point_to(given)) for kernel, given in calls]
    began_at = time.perf_counter()
    for kernel, pointers in prepared:
        kernel(ctypes.addressof(pointers))
    return time.perf_counter() - began_at
