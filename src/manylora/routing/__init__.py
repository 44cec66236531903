"""Routing: the choice of the replica that serves a request."""

from manylora.routing.auto import AutoRouter
from manylora.routing.dispatcher import Dispatcher
from manylora.routing.fallback import FallbackRouter
from manylora.routing.policies import (
    DEFAULT_ROUTER,
    ROUTERS,
    AffinityRouter,
    FirstFitRouter,
    LeastLoadedRouter,
    PowerOfTwoRouter,
    RandomRouter,
    RouterContext,
    make_router,
)
from manylora.routing.rank_aware import RankAwareRouter
from manylora.routing.router import Router
from manylora.routing.view import ReplicaReport, ReplicaView, Sent

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
