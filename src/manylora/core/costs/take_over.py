"""Within an assisted step: the layers that the device computes, because their weights have arrived by then.

::

    copy      | 0 | 1 | 2 | 3 | ...
    step      | layer 0: CPU workers  | layer 1: device | layer 2: device | ...

The decision is made layer by layer, for each adapter by itself: a layer that has not arrived when the step comes to it
is left to the workers, and the step waits for no weights. The live executor and the simulator decide alike. The live
one launches a step ahead of the device, so it extrapolates both times; weights that come later than expected are waited
for, so only time is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["count_on_cpu", "left_to_workers", "remaining_s", "takes_over"]

ItemT = TypeVar("ItemT")


def takes_over(arrives_at: float, begins_at: float) -> bool:
    """Whether the device computes a layer: its weights arrive before the step comes to it. Any origin of time."""
    return arrives_at <= begins_at


def left_to_workers(
    items: Sequence[ItemT], arrives_at: Callable[[ItemT], float], begins_at: float
) -> tuple[ItemT, ...]:
    """Return the assisted parts of a step that CPU workers compute in a layer which begins at ``begins_at``."""
    return tuple([item for item in items if not takes_over(arrives_at(item), begins_at)])


def remaining_s(num_done: int, num_wanted: int, elapsed_s: float) -> float:
    """Return the time until ``num_wanted`` are done, at the rate of the time so far; infinite while none is done."""
    if num_done >= num_wanted:
        return 0.0
    return elapsed_s * (num_wanted - num_done) / num_done if num_done else math.inf


def count_on_cpu(
    begins_s: float, layer_s: float, delay_s: float, copied_s: float, copy_layer_s: float, num_layers: int
) -> int:
    """Return the number of layers of a step that workers compute, if they and the copy go on at a constant rate.

    Args:
        begins_s: Begin of the step.
        layer_s: Duration of a layer on the device.
        delay_s: Time that a layer takes longer when workers compute it.
        copied_s: Arrival of the last layer.
        copy_layer_s: Time between the arrivals of two layers.
        num_layers: Layers of the model.
    """
    last = num_layers - 1
    first_s, assisted_s = copied_s - last * copy_layer_s, layer_s + delay_s
    if takes_over(copied_s, begins_s):
        return 0
    # Arrivals and an assisted step are lines over the layers, so the ends tell of all.
    if not takes_over(first_s, begins_s) and not takes_over(copied_s, begins_s + last * assisted_s):
        return num_layers
    at, count = begins_s, 0
    for layer in range(num_layers):
        if takes_over(first_s + layer * copy_layer_s, at):
            at += layer_s
        else:
            at += assisted_s
            count += 1
    return count
