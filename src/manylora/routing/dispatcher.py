"""The dispatcher: a router and its memory of what is under way where."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from manylora.routing.router import ReplicaLoad, Router
from manylora.types import Request

__all__ = ["Dispatcher"]


class Dispatcher:
    """Sends requests to replicas and keeps count.

    Args:
        router: Picks the replica.
        num_replicas: How many there are.
    """

    def __init__(self, router: Router, num_replicas: int) -> None:
        assert num_replicas >= 1
        self._router = router
        self._loads = [ReplicaLoad() for _ in range(num_replicas)]
        self._under_way: dict[str, tuple[int, int]] = {}  # request id -> replica, prompt tokens

    @property
    def loads(self) -> Seq[ReplicaLoad]:
        """What is under way, by replica."""
        return self._loads

    def dispatch(self, request: Request) -> int:
        """Return the replica for a request, and count it there until ``ended``."""
        replica = self._router.choose(request, self._loads)
        num_tokens = len(request.prompt)
        self._under_way[request.request_id] = replica, num_tokens
        self._loads[replica].num_requests += 1
        self._loads[replica].num_prompt_tokens += num_tokens
        return replica

    def ended(self, request_id: str) -> int:
        """Learn that a request is over, or was refused; return the replica it was sent to."""
        replica, num_tokens = self._under_way.pop(request_id)
        self._loads[replica].num_requests -= 1
        self._loads[replica].num_prompt_tokens -= num_tokens
        return replica
