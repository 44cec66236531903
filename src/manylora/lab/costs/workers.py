"""CPU workers that compute adapters from the host image beside the device's base product, as ``execution/assist`` does.

For each group of modules with one input (q/k/v, gate/up) the device's stream copies the activations of the cold rows to
the host, goes on with the base product of the group, and waits for each worker's ``x A B`` before it adds it::

    stream  | x, flags | base product of the group ....| waits | results, sums | next group
    workers            | x A B, each worker its own rows ......|

The rows are divided by the code that divides live ones (``core/costs/shares.py``): a worker reads the weights of every
adapter in its share, and one row of one adapter is one worker's. The base product of the group alone hides the workers'
time, not the whole layer. Copies and handoffs are the stream's, before and behind it, so nothing hides those.

Source: CaraServe, section 4; its published code hands over q, k and v of prompts only, as ``prompts_only`` does here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from manylora.core.adapters.shape import ELEMENT_BYTES
from manylora.core.costs.features import step_features
from manylora.core.costs.shares import (
    CORE_BYTES_PER_S,
    CORE_FLOPS_PER_S,
    HANDOFF_S,
    MAX_WORKERS,
    ROW_BYTES_PER_S,
    row_cost,
    split_rows,
)
from manylora.core.options import CheckedOptions, option
from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import AdapterKey
from manylora.lab.costs.roofline import RooflineCost

__all__ = ["AssistCost", "CpuWorkers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWorkers(CheckedOptions):
    """CPU cores beside an accelerator, and their exchange with it.

    The rates of a core are measured with weights that no cache holds (``bench/device.py --workers``).
    """

    cores: int = option(
        16, unit="cores", at_least=1, help=f"Cores that compute adapters; {MAX_WORKERS} are used at most, as live."
    )
    core_flops_per_s: float = option(CORE_FLOPS_PER_S, above=0, help="Operations per second of a core.")
    core_bytes_per_s: float = option(
        CORE_BYTES_PER_S, above=0, help="Rate at which a core reads weights beside the arithmetic of several rows."
    )
    row_bytes_per_s: float = option(
        ROW_BYTES_PER_S, above=0, help="Rate at which a core computes one row, by the bytes of the weights."
    )
    memory_bytes_per_s: float = option(100e9, above=0, help="Rate at which all cores together read weights.")
    handoff_s: float = option(
        HANDOFF_S, unit="s", at_least=0, help="Time of a handoff on the device's stream, to a worker or back."
    )
    prompts_only: bool = option(False, help="Compute no decode steps: those wait for the weights, as in CaraServe.")
    max_prompt_tokens: int | None = option(
        None, unit="tokens", at_least=1, help="Longest prompt chunk; longer ones wait for the weights."
    )
    takes_over: bool = option(
        False, help="Compute a layer on the device, within the step, once the weights of that layer have arrived."
    )

    def take(self, part: PlannedSequence) -> bool:
        """Whether the workers compute the adapter of a cold sequence in a step."""
        if part.num_tokens == 1:
            return not self.prompts_only or part.start < part.num_prompt_tokens
        return self.max_prompt_tokens is None or part.num_tokens <= self.max_prompt_tokens

    def run_s(self, num_rows: int, num_weights: int, element_bytes: int) -> float:
        """Return a core's time for rows of one adapter with so many weights."""
        num_bytes = num_weights * element_bytes
        if num_rows == 1:
            return num_bytes / self.row_bytes_per_s
        return num_bytes / self.core_bytes_per_s + 2 * num_rows * num_weights / self.core_flops_per_s


@dataclass(frozen=True, slots=True)
class _ModuleGroup:
    """A group of modules in one layer."""

    rank_weights: int  # adapter weights per unit of rank
    row_bytes: float  # bytes of activations that a row sends over the link of each device, there and back
    base_share: float  # part of the layers' products that is the base product of the group


class AssistCost:
    """Prices steps in which CPU workers compute the adapters of some sequences.

    Every adapter is priced as if all targets had its largest rank, as in ``RooflineCost``. Activations cross the link
    in float32, as if it were idle, and do not slow down the copy of weights.

    Args:
        cost: Prices the device, whose link carries the activations.
        workers: The cores.
    """

    def __init__(self, cost: RooflineCost, workers: CpuWorkers) -> None:
        self.workers = workers
        self._cost = cost
        self._num_layers = cost.dims.num_layers
        self._link_bytes_per_s = cost.hardware.link_bytes_per_s
        self._element_bytes = cost.dims.element_bytes
        self._groups = tuple(_groups(cost))
        self._rank_weights = sum(group.rank_weights for group in self._groups)

    def step_time_s(
        self, plan: StepPlan, assisted: Seq[PlannedSequence], left: Collection[AdapterKey | None] | None = None
    ) -> float:
        """Return the duration of a step in which the workers compute the adapters of some of its sequences.

        Args:
            plan: The step.
            assisted: The sequences whose rows are divided among the workers.
            left: The adapters that are left to the workers, by default all of them; the device has taken over the
                others, whose rows keep their place in the division.
        """
        on_cpu = {part.seq_id for part in assisted if left is None or part.adapter in left}
        on_device = [
            msgspec.structs.replace(part, adapter=None, rank=0) if part.seq_id in on_cpu else part
            for part in plan.sequences
        ]
        parts = self._cost.price(step_features(replace(plan, sequences=tuple(on_device))))
        return sum(parts) + self._num_layers * self.layer_delay_s(assisted, parts.layers_s / self._num_layers, left)

    def layer_delay_s(
        self, assisted: Seq[PlannedSequence], products_s: float, left: Collection[AdapterKey | None] | None = None
    ) -> float:
        """Return the delay of each layer in which the workers compute the adapters of some sequences.

        Args:
            assisted: The sequences.
            products_s: Time of the layer's base products in the step, in seconds.
            left: As for ``step_time_s``.
        """
        shares = self._divide(assisted, left)
        num_rows = sum(rows for share in shares for rows, _ in share)
        workers, delay_s = self.workers, 2 * len(shares) * len(self._groups) * self.workers.handoff_s
        for group in self._groups:
            num_weights, size = group.rank_weights, self._element_bytes
            slowest_s = max(
                [sum(workers.run_s(rows, rank * num_weights, size) for rows, rank in one) for one in shares]
            )
            num_read = sum(rank for share in shares for _, rank in share) * num_weights
            computing_s = max(slowest_s, num_read * size / workers.memory_bytes_per_s)
            delay_s += num_rows * group.row_bytes / self._link_bytes_per_s
            delay_s += max(0.0, computing_s - group.base_share * products_s)
        return delay_s

    def _divide(
        self, assisted: Seq[PlannedSequence], left: Collection[AdapterKey | None] | None
    ) -> list[list[tuple[int, int]]]:
        """Return the shares of the workers that have work: the number of rows and the rank of each adapter in it."""
        adapters: dict[AdapterKey | None, list[int]] = {}  # rows and rank; an adapter's rows are next to one another
        for part in assisted:
            adapters.setdefault(part.adapter, [0, part.rank])[0] += part.num_tokens
        workers = self.workers
        handoff_s = workers.handoff_s * len(self._groups)
        rates = (self._element_bytes, workers.core_flops_per_s, workers.core_bytes_per_s, handoff_s)
        costs = [(rows, row_cost(rank * self._rank_weights, *rates)) for rows, rank in adapters.values()]
        shares = []
        for first, last in pairwise(split_rows(costs, min(workers.cores, MAX_WORKERS))):
            share, at = [], 0
            for key, (rows, rank) in adapters.items():
                num_own = min(last, at + rows) - max(first, at)
                if num_own > 0 and (left is None or key in left):
                    share.append((num_own, rank))
                at += rows
            if share:
                shares.append(share)
        return shares


def _groups(cost: RooflineCost) -> Iterator[_ModuleGroup]:
    """Yield the groups of a layer in which adapters change modules."""
    dims = cost.dims
    layer_weights = dims.active_weights / dims.num_layers
    for group in dims.groups:
        shapes = [dims.module_shape(target) for target in group if target in cost.targets]
        if shapes:
            outputs = sum(shape[1] for shape in shapes)
            base_weights = sum(inputs * outputs for inputs, outputs in map(dims.module_shape, group))
            yield _ModuleGroup(
                rank_weights=sum(map(sum, shapes)),
                # Each device receives its own part of the results.
                row_bytes=(shapes[0][0] + outputs / cost.tensor_parallel_size) * ELEMENT_BYTES["float32"],
                base_share=base_weights / layer_weights,
            )
