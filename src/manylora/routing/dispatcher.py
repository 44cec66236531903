"""The dispatcher: a router and its memory of what is under way where."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq

from manylora.routing.router import ReplicaLoad, Router
from manylora.types import Request

__all__ = ["Dispatcher"]


class Dispatcher:
    """Sends requests to replicas and keeps count.

    Args:
        router: Picks the replica.
        num_replicas: How many there are.
        ranks: Rank of each adapter by name; an adapter that is not here counts as the base.
    """

    def __init__(self, router: Router, num_replicas: int, ranks: Mapping[str, int] | None = None) -> None:
        assert num_replicas >= 1
        self._router = router
        self._ranks = {} if ranks is None else ranks
        self._loads = [ReplicaLoad() for _ in range(num_replicas)]
        self._under_way: dict[str, tuple[int, int, int]] = {}  # request id -> replica, prompt tokens, rank

    @property
    def loads(self) -> Seq[ReplicaLoad]:
        """The requests in flight, by replica."""
        return self._loads

    def dispatch(self, request: Request, serving: Container[int] | None = None) -> int:
        """Return the replica for a request, and count it there until ``ended``.

        Args:
            request: The request.
            serving: The replicas that can take it, at least one; all when ``None``. The router is asked among all
                first, so that an outage moves the requests of the replica that is out and no others.
        """
        replica = self._router.choose(request, self._loads)
        if serving is not None and replica not in serving:
            left = [index for index in range(len(self._loads)) if index in serving]
            replica = left[self._router.choose(request, [self._loads[index] for index in left])]
        num_tokens, rank = len(request.prompt), self._ranks.get(request.model, 0)
        self._under_way[request.request_id] = replica, num_tokens, rank
        self._loads[replica].add(num_tokens, rank)
        return replica

    def ended(self, request_id: str) -> int:
        """Learn that a request is over, or was refused; return the replica it was sent to."""
        replica, num_tokens, rank = self._under_way.pop(request_id)
        self._loads[replica].remove(num_tokens, rank)
        return replica
