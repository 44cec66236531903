"""The interface of routing policies, and the load of a replica as a router sees it.

A router counts the requests that it sent and that ended; it does not look inside replicas. So the same policy works for
simulated engines, for processes and for other machines, and none depends on figures that arrive late.
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
        num_prompt_tokens: Tokens of their prompts.
        sum_rank: Sum of the ranks of their adapters.
        ranks: Number of requests by the rank of their adapter; the base is rank 0.
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
        """Count a request in."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.sum_rank += rank
        self.ranks[rank] += 1

    def remove(self, num_prompt_tokens: int, rank: int) -> None:
        """Count a request out."""
        self.num_requests -= 1
        self.num_prompt_tokens -= num_prompt_tokens
        self.sum_rank -= rank
        self.ranks[rank] -= 1
        if not self.ranks[rank]:
            del self.ranks[rank]


class Router(Protocol):
    """Chooses replicas. It gets its random generator on construction, and reads no clock."""

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Return the index of the replica that is to serve ``request``; there is at least one."""
        ...
