"""The interface of routing policies: one question, answered from what a router can know.

A router sees what it sent and what came back, not the inside of replicas: so the same policy works in front of
simulated engines, of processes and of other machines, and none rests on figures that are old when they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from manylora.types import Request

__all__ = ["ReplicaLoad", "Router"]


@dataclass(slots=True)
class ReplicaLoad:
    """What is under way at one replica.

    Args:
        num_requests: Requests sent to it that have not ended.
        num_prompt_tokens: Their prompts, in tokens.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0


class Router(Protocol):
    """Picks a replica. Told its chance on construction; reads no clock."""

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Return the index of the replica that is to serve ``request``; there is at least one."""
        ...
