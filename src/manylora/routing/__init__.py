"""Which replica serves a request."""

from manylora.routing.dispatcher import Dispatcher
from manylora.routing.policies import (
    ROUTERS,
    AffinityRouter,
    LeastLoadedRouter,
    PowerOfTwoRouter,
    RandomRouter,
    make_router,
)
from manylora.routing.router import ReplicaLoad, Router

__all__ = [
    "ROUTERS",
    "AffinityRouter",
    "Dispatcher",
    "LeastLoadedRouter",
    "PowerOfTwoRouter",
    "RandomRouter",
    "ReplicaLoad",
    "Router",
    "make_router",
]
