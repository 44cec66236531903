"""Routing: the choice of the replica that serves a request."""

from manylora.routing.dispatcher import Dispatcher
from manylora.routing.policies import (
    ROUTERS,
    AffinityRouter,
    FirstFitRouter,
    LeastLoadedRouter,
    PowerOfTwoRouter,
    RandomRouter,
    RouterContext,
    make_router,
)
from manylora.routing.rank_aware import RankAwareRouter, StepModel
from manylora.routing.router import ReplicaLoad, Router

__all__ = [
    "ROUTERS",
    "AffinityRouter",
    "Dispatcher",
    "FirstFitRouter",
    "LeastLoadedRouter",
    "PowerOfTwoRouter",
    "RandomRouter",
    "RankAwareRouter",
    "ReplicaLoad",
    "Router",
    "RouterContext",
    "StepModel",
    "make_router",
]
