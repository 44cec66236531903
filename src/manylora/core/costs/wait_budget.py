"""Patience: how long a step waits for adapters on their way, before it goes on without their sequences.

::

    step      layer 0 | waits for A | layer 1 | waits for A and B | layer 2 ...    A and B are late from here on
    patience          |-- spent ----|         |-- spent, none left|

All sequences of a step wait with it, and a read that hangs takes minutes to be given up. So the waits of a step add up,
for all layers of all adapters. Once they have taken all its patience, an adapter whose layer is not there is *late*:
the step waits for it no more, and gives up its sequences (``core/engine/steps/late_sequences.py``). One that has kept
up goes on. The live executor and the simulator decide alike; the live one learns of a late layer only when its patience
is spent.
"""

from __future__ import annotations

__all__ = ["MAX_WAIT_S", "WaitBudget"]

MAX_WAIT_S = 1.0
"""Longest wait of a step for the layers of its adapters, in seconds."""


class WaitBudget:
    """The time that a step may yet wait for adapters, all of them together.

    Args:
        seconds: At the begin of the step; infinite for no limit.
    """

    def __init__(self, seconds: float = MAX_WAIT_S) -> None:
        self.left_s = seconds

    def outlasts(self, wait_s: float) -> bool:
        """Whether the step would wait for so long; if not, the adapter is late once the rest is spent."""
        return wait_s <= self.left_s

    def spend(self, wait_s: float) -> None:
        """Count a wait that is over."""
        self.left_s = max(0.0, self.left_s - wait_s)
