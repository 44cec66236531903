"""CPU workers that compute adapters from the host image, beside the device's base product.

For each group of modules with one input (q/k/v, gate/up) the device hands the activations of the cold rows to the
workers, goes on with the base product of the group, and waits for their ``x A B`` before it needs the sum::

    device  | base product of the group ....| waits | next group
    workers   | handoff | x over the link, x A B, back over the link | handoff |

So a group delays its layer by the excess of the exchange over the base product, and only the base product of that group
can hide it, not the whole layer.

Source: CaraServe, section 4; its published code hands over q, k and v of prompts only, as ``prompts_only`` does here.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import msgspec

from manylora.core.costs.features import step_features
from manylora.core.options import CheckedOptions, option
from manylora.core.plan import PlannedSequence, StepPlan
from manylora.lab.costs.roofline import RooflineCost

__all__ = ["AssistCost", "CpuWorkers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWorkers(CheckedOptions):
    """CPU cores beside an accelerator, and their exchange with it.

    The rate of a core was measured with AVX-512: 34 microseconds per token and layer for rank 64 on q, k and v of
    Llama-2-7B, in calls of 64 tokens. Few tokens are bound by the read of the weights instead.
    """

    cores: int = option(16, unit="cores", at_least=1, help="Cores that compute adapters.")
    core_flops_per_s: float = option(92.5e9, above=0, help="Operations per second of a core.")
    memory_bytes_per_s: float = option(100e9, above=0, help="Rate at which all cores together read weights.")
    handoff_s: float = option(10e-6, unit="s", at_least=0, help="Time of a handoff, device to workers or back.")
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


@dataclass(frozen=True, slots=True)
class _ModuleGroup:
    """A group of modules in one layer.

    Args:
        rank_weights: Adapter weights per unit of rank.
        row_bytes: Bytes of activations that a row sends over the link of each device, there and back.
        base_share: Part of the layers' products that is the base product of the group.
    """

    rank_weights: int
    row_bytes: float
    base_share: float


class AssistCost:
    """Prices steps in which CPU workers compute the adapters of some sequences.

    Every adapter is priced as if all targets had its largest rank, as in ``RooflineCost``. The transfers of activations
    are priced as if the link were idle, and do not slow down the copy of weights.

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

    def step_time_s(self, plan: StepPlan, on_cpu: Seq[PlannedSequence]) -> float:
        """Return the duration of a step in which the workers compute the adapters of some of its sequences.

        Args:
            plan: The step.
            on_cpu: The sequences whose adapters the workers compute.
        """
        taken = {part.seq_id for part in on_cpu}
        on_device = [
            msgspec.structs.replace(part, adapter=None, rank=0) if part.seq_id in taken else part
            for part in plan.sequences
        ]
        parts = self._cost.price(step_features(replace(plan, sequences=tuple(on_device))))
        return sum(parts) + self._num_layers * self.layer_delay_s(on_cpu, parts.layers_s / self._num_layers)

    def layer_delay_s(self, parts: Seq[PlannedSequence], products_s: float) -> float:
        """Return the delay of each layer in which the workers compute the adapters of some sequences.

        Args:
            parts: The sequences.
            products_s: Time of the layer's base products in the step, in seconds.
        """
        rows = sum(part.num_tokens for part in parts)
        row_rank = sum(part.num_tokens * part.rank for part in parts)
        sum_rank = sum({part.adapter: part.rank for part in parts}.values())
        workers, delay_s = self.workers, 0.0
        for group in self._groups:
            computing_s = 2 * row_rank * group.rank_weights / (workers.cores * workers.core_flops_per_s)
            reading_s = sum_rank * group.rank_weights * self._element_bytes / workers.memory_bytes_per_s
            moving_s = rows * group.row_bytes / self._link_bytes_per_s
            exchange_s = max(computing_s, reading_s) + moving_s + 2 * workers.handoff_s
            delay_s += max(0.0, exchange_s - group.base_share * products_s)
        return delay_s


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
                row_bytes=(shapes[0][0] + outputs / cost.tensor_parallel) * dims.element_bytes,
                base_share=base_weights / layer_weights,
            )
