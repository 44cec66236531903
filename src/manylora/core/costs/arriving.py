"""Within a step whose adapters are still on their way: the layers that the CPU computes, and the longest wait.

The live executor and the simulator decide alike, layer by layer and for each adapter by itself.

*Take-over*, in an assisted step: a layer that has not arrived when the step comes to it is left to the CPU workers, and
the step waits for no weights. The live executor launches a step ahead of the device, so it extrapolates both times;
weights that come later than expected are waited for, so only time is lost.

::

    copy      | 0 | 1 | 2 | 3 | ...
    step      | layer 0: CPU workers  | layer 1: device | layer 2: device | ...

*Wait budget*, in a step that runs on layers as they arrive: all its sequences wait with it, and a read that hangs takes
minutes to be abandoned. So the waits of a step add up, for all layers of all adapters. Once they have taken the whole
budget, an adapter whose layer is not there is *late*: the step waits for it no more and leaves its sequences out, which
are sent back (``core/engine/steps/running.py``). An adapter that has kept up goes on. The live executor learns of a
late layer only when the budget is spent.

::

    step      layer 0 | waits for A | layer 1 | waits for A and B | layer 2 ...    A and B are late from here on
    budget            |-- spent ----|         |-- spent, none left|
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["MAX_WAIT_S", "WaitBudget", "count_on_cpu", "left_to_workers", "remaining_s", "takes_over"]

ItemT = TypeVar("ItemT")

MAX_WAIT_S = 1.0  # longest wait of a step for the layers of its adapters, in seconds


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

    A layer takes ``layer_s`` on the device and ``delay_s`` longer by workers. The last layer arrives at ``copied_s``,
    and they are ``copy_layer_s`` apart.
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


class WaitBudget:
    """The seconds that a step may yet wait for adapters, all of them together; infinite for no limit."""

    def __init__(self, seconds: float = MAX_WAIT_S) -> None:
        self.left_s = seconds
        self.spent_s = 0.0

    def spend(self, wait_s: float) -> None:
        """Count a wait that is over."""
        self.left_s = max(0.0, self.left_s - wait_s)
        self.spent_s += wait_s
