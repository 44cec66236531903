"""The interface of routing policies: one question, answered from what a router can know.

A router sees what it sent and what came back, not the inside of replicas: so the same policy works in front of
simulated engines, of processes and of other machines, and none rests on figures that are old when they arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from manylora.types import Request

__all__ = ["ReplicaLoad", "Router"]


@dataclass(slots=True)
class ReplicaLoad:
    """The requests in flight at one replica.

    Args:
        num_requests: Requests sent to it that have not ended.
        num_prompt_tokens: Their prompts, in tokens.
        sum_rank: Sum of the ranks of their adapters.
        ranks: How many of them have an adapter of each rank; the base is rank 0.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    sum_rank: int = 0
    ranks: Counter[int] = field(default_factory=Counter)

    @property
    def max_rank(self) -> int:
        """The largest rank among them."""
        return max(self.ranks, default=0)

    def add(self, num_prompt_tokens: int, rank: int) -> None:
        """Count a request that is sent."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.sum_rank += rank
        self.ranks[rank] += 1

    def remove(self, num_prompt_tokens: int, rank: int) -> None:
        """Count a request that is over."""
        self.num_requests -= 1
        self.num_prompt_tokens -= num_prompt_tokens
        self.sum_rank -= rank
        self.ranks[rank] -= 1
        if not self.ranks[rank]:
            del self.ranks[rank]


class Router(Protocol):
    """Picks a replica. Told its chance on construction; reads no clock."""

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Return the index of the replica that is to serve ``request``; there is at least one."""
        ...
