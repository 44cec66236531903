"""The dispatcher: a router, and the requests in flight at each replica."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq

from manylora.routing.router import ReplicaLoad, Router
from manylora.types import Request

__all__ = ["Dispatcher"]


class Dispatcher:
    """Chooses replicas and counts their requests.

    Args:
        ranks: Rank of each adapter by name; a name that is missing counts as the base.
    """

    def __init__(self, router: Router, num_replicas: int, ranks: Mapping[str, int] | None = None) -> None:
        assert num_replicas >= 1
        self._router = router
        self._ranks = {} if ranks is None else ranks
        self._loads = [ReplicaLoad() for _ in range(num_replicas)]
        self._in_flight: dict[str, tuple[int, int, int]] = {}  # request id -> replica, prompt tokens, rank

    @property
    def loads(self) -> Seq[ReplicaLoad]:
        """The requests in flight, by replica."""
        return self._loads

    def dispatch(self, request: Request, serving: Container[int] | None = None) -> int:
        """Return the replica for a request, and count it there until ``ended``.

        ``serving`` names the replicas that can take it, at least one; all when ``None``. The router chooses among all
        first, so that an outage moves only the requests of the replica that is out.
        """
        replica = self._router.choose(request, self._loads)
        if serving is not None and replica not in serving:
            left = [index for index in range(len(self._loads)) if index in serving]
            replica = left[self._router.choose(request, [self._loads[index] for index in left])]
        num_tokens, rank = len(request.prompt), self._ranks.get(request.model, 0)
        self._in_flight[request.request_id] = replica, num_tokens, rank
        self._loads[replica].add(num_tokens, rank)
        return replica

    def ended(self, request_id: str) -> int:
        """Learn that a request ended or was refused; return its replica."""
        replica, num_tokens, rank = self._in_flight.pop(request_id)
        self._loads[replica].remove(num_tokens, rank)
        return replica
