"""Routing policies: random, by load, and by adapter within a bound on load; by rank in ``rank_aware.py``.

The route of a request decides which replica needs its adapter. Spread evenly, every replica comes to hold every
adapter. Kept together, each holds a share of them and hits its cache more often, but a popular adapter can exceed the
capacity of one replica. ``affinity`` keeps requests together until the load exceeds a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random
from typing import Any

from manylora.errors import ConfigError
from manylora.plugins import find_factory, made_by, options_for, takes
from manylora.routing.rank_aware import RankAwareRouter, StepModel
from manylora.routing.router import ReplicaLoad, Router
from manylora.types import Request

__all__ = [
    "ROUTERS",
    "AffinityRouter",
    "FirstFitRouter",
    "LeastLoadedRouter",
    "PowerOfTwoRouter",
    "RandomRouter",
    "RouterContext",
    "make_router",
]

OVERLOAD = 1.25
"""Most load of a replica, relative to the mean, before an adapter spills over; the factor of the source's examples."""


class RandomRouter:
    """Any replica, with equal probability."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Draw a replica."""
        return self._rng.randrange(len(replicas))


class LeastLoadedRouter:
    """The replica with the fewest requests in flight; of equals, that with the fewest prompt tokens."""

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Compare all of them."""
        return _least_loaded(replicas)


class FirstFitRouter:
    """The first replica with a free seat, so that the last ones can be switched off; the least loaded if none has.

    Source: the bin packing that Punica uses to consolidate, and CaraServe compares with.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Search from the first on."""
        for index, replica in enumerate(replicas):
            if replica.num_requests < self._max_num_seqs:
                return index
        return _least_loaded(replicas)


class PowerOfTwoRouter:
    """The less loaded of two random replicas: nearly as even as comparing all, without herding.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Compare two of them."""
        if len(replicas) == 1:
            return 0
        return _least_loaded(replicas, self._rng.sample(range(len(replicas)), 2))


class AffinityRouter:
    """The home replica of an adapter; the next in the adapter's own order while that one is overloaded.

    Every adapter orders the replicas by a hash of both names (rendezvous hashing): a new replica takes over its fair
    share of adapters and moves no others. A replica is skipped while it has ``overload`` times its share of the load,
    so a popular adapter spreads over as many as it needs, always the same ones. Requests for the base go to the least
    loaded replica.

    Args:
        base_name: The base model's name in requests.
        overload: Most load, relative to the mean; above 1.

    Source: Thaler and Ravishankar, 1998 (rendezvous hashing); Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing
    with bounded loads", 2018.
    """

    def __init__(self, base_name: str = "", overload: float = OVERLOAD) -> None:
        if overload <= 1.0:
            raise ConfigError(f"Got {overload = }, expected a number above 1")
        self._base_name = base_name
        self._overload = overload
        self._orders: dict[tuple[str, int], tuple[int, ...]] = {}

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Return the first replica with room in the adapter's order; one always is at or below the mean."""
        if request.model in ("", self._base_name):
            return _least_loaded(replicas)
        num_requests = 1 + sum(replica.num_requests for replica in replicas)
        most = math.ceil(self._overload * num_requests / len(replicas))
        return next(index for index in self._order(request.model, len(replicas)) if replicas[index].num_requests < most)

    def _order(self, adapter: str, num_replicas: int) -> tuple[int, ...]:
        """Return the replicas in the order of an adapter, cached."""
        order = self._orders.get((adapter, num_replicas))
        if order is None:
            order = tuple(sorted(range(num_replicas), key=lambda index: _rank(adapter, index)))
            self._orders[adapter, num_replicas] = order
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterContext:
    """The view that a router has of the service.

    Args:
        base_name: The base model's name in requests.
        max_num_seqs: Requests that a replica runs at once.
        ranks: Rank of each adapter by name.
        steps: The cost of steps, if known.
        mean_answer_tokens: Mean length of an answer.
        options: The router's own ``Options``, checked; ``None`` where it has none.
    """

    rng: Random
    base_name: str = ""
    max_num_seqs: int = 128
    ranks: Mapping[str, int] = field(default_factory=dict)
    steps: StepModel | None = None
    mean_answer_tokens: float = 200.0
    options: Any = None


@takes(RankAwareRouter.Options)
def _rank_aware(context: RouterContext) -> Router:
    if context.steps is None:
        raise ConfigError("Router 'rank-aware' needs the cost of steps")
    return RankAwareRouter(
        context.steps, context.ranks, mean_answer_tokens=context.mean_answer_tokens, tbt_s=context.options.tbt_s
    )


ROUTERS: dict[str, Callable[[RouterContext], Router]] = {
    "affinity": lambda context: AffinityRouter(context.base_name),
    "first-fit": lambda context: FirstFitRouter(context.max_num_seqs),
    "least-loaded": lambda context: LeastLoadedRouter(),
    "power-of-two": lambda context: PowerOfTwoRouter(context.rng),
    "random": lambda context: RandomRouter(context.rng),
    "rank-aware": _rank_aware,
}


def make_router(name: str, context: RouterContext, given: Mapping[str, object] | None = None) -> Router:
    """Make a router by its name.

    Args:
        name: In ``ROUTERS``, or a plug-in (``plugins.py``).
        context: Its view of the service; ``options`` is set here.
        given: Its options, by key.

    Raises:
        ConfigError: No router has that name, an option is wrong, or it needs the cost of steps and that is unknown.
    """
    options = options_for("router", name, ROUTERS, given or {})
    return made_by(
        "router", name, find_factory("router", name, ROUTERS), replace(context, options=options), seam=Router
    )


def _least_loaded(replicas: Seq[ReplicaLoad], indices: Iterable[int] | None = None) -> int:
    among = range(len(replicas)) if indices is None else indices
    return min(among, key=lambda index: (replicas[index].num_requests, replicas[index].num_prompt_tokens, index))


def _rank(adapter: str, replica: int) -> bytes:
    return blake2b(f"{replica}/{adapter}".encode(), digest_size=8).digest()
