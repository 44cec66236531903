"""The interface of routing policies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from manylora.core.routing.view import ReplicaView
from manylora.core.types import Request

__all__ = ["Router"]


class Router(Protocol):
    """Chooses replicas. It gets its random generator on construction, and reads no clock."""

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Return the index of the replica that is to serve ``request``; asked once per request.

        Args:
            request: The request.
            replicas: All replicas, those included that are out for now.
            among: Indices of the replicas that can serve, rising; at least one. An outage should move only the requests
                of the replica that is out.
        """
        ...
