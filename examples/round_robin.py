"""A router of one's own: one replica after the other, blind to adapters and load.

`manylora route --backend ... --router examples/round_robin.py:RoundRobin`, or `manylora simulate --router ...`.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.core.routing import ReplicaView, RouterContext
from manylora.core.types import Request


class RoundRobin:
    """Takes turns."""

    def __init__(self, context: RouterContext) -> None:
        self._turn = -1

    def choose(self, request: Request, replicas: Sequence[ReplicaView], among: Sequence[int]) -> int:
        """Return the next one."""
        self._turn += 1
        return among[self._turn % len(among)]
