"""How many cores a step's rows go to, and which rows go to which: by measured tokens per core (CaraServe, 4.2).

A core's time for ``n`` rows of an adapter is ``fixed + n * row``: reading the weights, and arithmetic. A second core
halves the arithmetic, and reads the weights again. It pays from ``fixed / row`` rows on, the *tokens per core*. And it
adds a wait, a copy and a sum to the stream, so the number of cores also stays below the one at which these cost as much
as the arithmetic that another core saves: the square root of (time of all rows / time of a handoff).

The figures are measured once for each class of (inputs, outputs, rank), when the first adapter of that class is copied
to the device, on the thread that copies: a measurement takes tens of milliseconds, for which no step must wait. A step
before that takes a guess. The rank counts as its next power of two.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora.core.adapters.layout import AdapterLayout, GroupLayout, ModuleLayout, Tile
from manylora.core.adapters.shape import ModuleKind, TargetModule
from manylora.execution.kernels.cpu.openmp import point_to
from manylora.execution.kernels.cpu.products import make_product_tables, product_arguments, product_kernel
from manylora.execution.storage.resident import AdapterMemory

__all__ = ["RowCost", "adapter_cost", "measure_classes", "split_rows"]

PROBE_ROWS = (16, 64)
ROUNDS = 3

GUESS_S = 34e-6 / (64 * 4 * 4096)
"""Seconds per row and weight row of an adapter before a measurement: 34 us for q, k and v of a 7B model at rank 64."""

HANDOFF_S = 10e-6
"""A wait, a copy and a sum of one exchange, in seconds, on a GPU's stream and in the thread that launches them."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """A core's time in seconds: ``fixed_s`` to read the weights of an adapter, and ``row_s`` for each row.

    ``handoff_s`` is the stream's, for the exchanges with one more core.
    """

    fixed_s: float
    row_s: float
    handoff_s: float = 0.0

    @property
    def tokens_per_core(self) -> float:
        """Rows from which on another core pays."""
        return max(1.0, self.fixed_s / self.row_s) if self.row_s > 0 else math.inf


_Class = tuple[int, int, int]

_measured: dict[_Class, RowCost] = {}


def measure_classes(groups: Iterable[GroupLayout]) -> None:
    """Measure the classes of these groups that are not known yet; takes tens of milliseconds for each."""
    for of_group in {_class_of(group): None for group in groups}:
        if of_group not in _measured:
            _measured[of_group] = _measure(*of_group)


def adapter_cost(groups: Iterable[GroupLayout]) -> RowCost:
    """Return the cost of an adapter's rows in all these groups of a step; guesses what was not measured."""
    costs = [_measured.get(of_group) or _guess(*of_group) for of_group in map(_class_of, groups)]
    fixed_s, row_s = sum(cost.fixed_s for cost in costs), sum(cost.row_s for cost in costs)
    return RowCost(fixed_s, row_s, HANDOFF_S * len(costs))


def split_rows(segments: Sequence[tuple[int, RowCost]], num_workers: int) -> list[int]:
    """Return the first row of each worker's share, of equal cost, and the number of rows at the end.

    Args:
        segments: Number of rows of each adapter, one after another, and their cost.
        num_workers: Workers at most; fewer are used if each would have less than its tokens per core.
    """
    total = sum(num_rows for num_rows, _ in segments)
    wanted = math.ceil(sum(num_rows / cost.tokens_per_core for num_rows, cost in segments))
    handoff_s = max(cost.handoff_s for _, cost in segments)
    if handoff_s > 0:
        wanted = min(wanted, round(math.sqrt(sum(num_rows * cost.row_s for num_rows, cost in segments) / handoff_s)))
    num = max(1, min(num_workers, wanted, total))
    row_costs = [np.full(n, cost.fixed_s / max(n, 1) + cost.row_s) for n, cost in segments]
    ends = np.cumsum(np.concatenate(row_costs))
    # A share begins with the row in whose middle the shares before it are complete; each has a row at least.
    middles = ends - np.concatenate(row_costs) / 2
    firsts = [0]
    for share in range(1, num):
        first = int(np.searchsorted(middles, ends[-1] * share / num))
        firsts.append(min(max(first, firsts[-1] + 1), total - num + share))
    return [*firsts, total]


def _class_of(group: GroupLayout) -> _Class:
    """Return inputs, outputs and rank of one module with the work of the group."""
    work = sum(part.rank * part.module.out_features for part in group.modules)
    return group.in_features, max(1, work // group.rank), 1 << (group.rank - 1).bit_length()


def _guess(inputs: int, outputs: int, rank: int) -> RowCost:
    row_s = GUESS_S * rank * (inputs + outputs)
    return RowCost(row_s, row_s)


def _measure(inputs: int, outputs: int, rank: int) -> RowCost:
    weights = _probe(inputs, outputs, rank)
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(product_kernel())
    took = []
    for num_rows in PROBE_ROWS:
        x, out = torch.zeros(num_rows, inputs), torch.zeros(num_rows, outputs)
        (tables,) = make_product_tables([(0, num_rows, weights)], list(weights.layout.groups)).values()
        arguments = product_arguments(x, out, tables, 1)
        pointers = point_to(arguments)
        took.append(min(_time(kernel, ctypes.addressof(pointers)) for _ in range(ROUNDS)))
    few, many = PROBE_ROWS
    row_s = max((took[1] - took[0]) / (many - few), took[1] / many / 4)
    return RowCost(max(0.0, took[1] - many * row_s), row_s)


def _probe(inputs: int, outputs: int, rank: int) -> AdapterMemory:
    """Return an adapter on one module, in memory of its own."""
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
    layout = AdapterLayout({"probe": group}, 1, num_a + num_b, "float32")
    return AdapterMemory(layout, torch.zeros(1, num_a + num_b), (0,))


def _time(kernel: Callable[[int], object], pointers: int) -> float:
    began_at = time.perf_counter()
    kernel(pointers)
    return time.perf_counter() - began_at
