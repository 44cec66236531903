"""Routing: the choice of the replica that serves a request."""

from manylora.core.routing.policies import DEFAULT_ROUTER, ROUTERS, FallbackRouter, RouterContext, make_router
from manylora.core.routing.router import Dispatcher, Router
from manylora.core.routing.view import ReplicaReport, ReplicaView

__all__ = [
    "DEFAULT_ROUTER",
    "ROUTERS",
    "Dispatcher",
    "FallbackRouter",
    "ReplicaReport",
    "ReplicaView",
    "Router",
    "RouterContext",
    "make_router",
]
