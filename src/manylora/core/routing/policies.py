"""Routing policies: random, by load, and by adapter within a bound on load; others have files of their own.

The route of a request decides which replica needs its adapter. Spread evenly, every replica comes to hold every
adapter. Kept together, each holds a share of them and hits its cache more often, but a popular adapter can exceed the
capacity of one replica. ``affinity`` keeps requests together until the load exceeds a bound.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from manylora.core.plugins import made_by, options_for, takes
from manylora.core.routing.auto import AutoRouter
from manylora.core.routing.rank_aware import RankAwareRouter
from manylora.core.routing.rank_placement import RankPlacementRouter
from manylora.core.routing.router import Rendezvous, Router, least_loaded
from manylora.core.routing.view import ReplicaView
from manylora.core.types import Request

__all__ = [
    "DEFAULT_ROUTER",
    "ROUTERS",
    "AffinityRouter",
    "FallbackRouter",
    "FirstFitRouter",
    "LeastLoadedRouter",
    "PowerOfTwoRouter",
    "RandomRouter",
    "RouterContext",
    "make_router",
]

logger = logging.getLogger(__name__)

OVERLOAD = 1.25
"""Most load of a replica, relative to the mean, before an adapter spills over; the factor of the source's examples."""


class RandomRouter:
    """Any replica, with equal probability."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Draw a replica."""
        return among[self._rng.randrange(len(among))]


class LeastLoadedRouter:
    """The replica with the fewest requests in flight; ties go to the fewest prompt tokens.

    CaraServe's *most idle*.
    """

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Compare all replicas."""
        return least_loaded(replicas, among)


class FirstFitRouter:
    """The first replica with a free seat, so that the last replicas can be switched off; the least loaded if none has.

    Source: the bin packing that Punica uses to consolidate, and CaraServe compares with.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Search from the first on."""
        for index in among:
            if replicas[index].load < self._max_num_seqs:
                return index
        return least_loaded(replicas, among)


class PowerOfTwoRouter:
    """The less loaded of two random replicas: nearly as even as comparing all, without herding.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Compare two replicas that are drawn at random."""
        if len(among) == 1:
            return among[0]
        return least_loaded(replicas, self._rng.sample(among, 2))


class AffinityRouter:
    """The home replica of an adapter; the next in the adapter's own order while that one is overloaded.

    Every adapter has an order of the replicas (``Rendezvous``). A replica is skipped while it has ``OVERLOAD`` times
    its share of the load, so a popular adapter spreads over as many as it needs, always the same replicas. Requests for
    the base go to the least loaded replica.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018.
    """

    def __init__(self, base_name: str = "") -> None:
        self._base_name = base_name
        self._rendezvous = Rendezvous()

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Return the first replica with room in the adapter's order; one always is at or below the mean."""
        if request.model in ("", self._base_name):
            return least_loaded(replicas, among)
        num_requests = 1 + sum([replicas[index].load for index in among])
        most = math.ceil(OVERLOAD * num_requests / len(among))
        order = self._rendezvous.order(request.model, len(replicas))
        return next(index for index in order if index in among and replicas[index].load < most)


class FallbackRouter:
    """A router that is replaced by the least loaded where it raises, or names a replica that cannot serve.

    For live fleets: a fault in code of an operator must not end a request.

    The first fault is logged, then the second, the fourth, the eighth and so on. A simulation uses routers as they are:
    there a fault should end the run.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterContext:
    """The view that a router has of the service."""

    rng: Random
    base_name: str = ""  # the base model's name in requests
    max_num_seqs: int = 128  # requests that a replica runs at once
    ranks: Mapping[str, int] = field(default_factory=dict)  # rank of each adapter by name
    options: Any = None  # the router's own ``Options``, checked; ``None`` where it has none


@takes(AutoRouter.Options)
def _auto(context: RouterContext) -> Router:
    options = context.options
    return AutoRouter(context.ranks, max_num_seqs=context.max_num_seqs, tbt_s=options.tbt_s, prefixes=options.prefixes)


ROUTERS: dict[str, Callable[[RouterContext], Router]] = {
    "affinity": lambda context: AffinityRouter(context.base_name),
    "auto": _auto,
    "first-fit": lambda context: FirstFitRouter(context.max_num_seqs),
    "least-loaded": lambda context: LeastLoadedRouter(),
    "power-of-two": lambda context: PowerOfTwoRouter(context.rng),
    "random": lambda context: RandomRouter(context.rng),
    "rank-aware": takes(RankAwareRouter.Options)(
        lambda context: RankAwareRouter(context.ranks, tbt_s=context.options.tbt_s)
    ),
    "rank-placement": lambda context: RankPlacementRouter(context.ranks, context.rng),
}

DEFAULT_ROUTER = "auto"


def make_router(name: str, context: RouterContext, given: Mapping[str, object] | None = None) -> Router:
    """Make a router by its name in ``ROUTERS``, or a plug-in (``plugins.py``), with its options.

    ``ConfigError`` if no router has that name, or an option is wrong.
    """
    options = options_for("router", name, ROUTERS, given or {})
    return made_by("router", name, ROUTERS, replace(context, options=options), seam=Router)
