"""A router whose faults cost no request, for live fleets: code of an operator must not end one."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence as Seq

from manylora.core.routing.policies import LeastLoadedRouter
from manylora.core.routing.router import Router
from manylora.core.routing.view import ReplicaView
from manylora.core.types import Request

__all__ = ["FallbackRouter"]

logger = logging.getLogger(__name__)


class FallbackRouter:
    """A router that is replaced by the least loaded where it raises, or names a replica that cannot serve.

    The first fault is logged, then the second, the fourth, the eighth and so on. A simulation uses routers as they
    are: there a fault should end the run.

    Args:
        router: Chooses, as long as it can.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._otherwise = LeastLoadedRouter()
        self._num_faults = 0

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Ask the router, and check its answer."""
        try:
            replica = operator.index(self._router.choose(request, replicas, among))
            if replica not in among:
                raise ValueError(f"it chose {replica = }, expected one of {list(among)}")
        except Exception:
            self._num_faults += 1
            if self._num_faults.bit_count() == 1:
                logger.exception("router_failed times=%d router=%s", self._num_faults, type(self._router).__name__)
            return self._otherwise.choose(request, replicas, among)
        return replica
