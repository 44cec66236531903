"""Routing: the choice of the replica that serves a request."""

from manylora.core.routing.auto import AutoRouter
from manylora.core.routing.dispatcher import Dispatcher
from manylora.core.routing.policies import (
    DEFAULT_ROUTER,
    ROUTERS,
    AffinityRouter,
    FallbackRouter,
    FirstFitRouter,
    LeastLoadedRouter,
    PowerOfTwoRouter,
    RandomRouter,
    RouterContext,
    make_router,
)
from manylora.core.routing.rank_aware import RankAwareRouter
from manylora.core.routing.router import Router
from manylora.core.routing.view import ReplicaReport, ReplicaView, Sent

__all__ = [
    "DEFAULT_ROUTER",
    "ROUTERS",
    "AffinityRouter",
    "AutoRouter",
    "Dispatcher",
    "FallbackRouter",
    "FirstFitRouter",
    "LeastLoadedRouter",
    "PowerOfTwoRouter",
    "RandomRouter",
    "RankAwareRouter",
    "ReplicaReport",
    "ReplicaView",
    "Router",
    "RouterContext",
    "Sent",
    "make_router",
]
