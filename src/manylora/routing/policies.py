"""Routing policies: by chance, by load, by adapter, and the two of them together; by rank in ``rank_aware.py``.

Where a request goes decides which replica needs its adapter. Spread evenly, every replica comes to hold every adapter;
kept together, each holds a share of them and hits its cache more often, but a popular adapter may be more than one
replica can serve. ``affinity`` does the second until load calls for the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from manylora.errors import ConfigError
from manylora.plugins import find_factory, made_by
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
"""How far above the mean a replica's load may go before an adapter spills over; the factor of the source's examples."""


class RandomRouter:
    """Any replica, with equal chance.

    Args:
        rng: Its chance.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Draw one."""
        return self._rng.randrange(len(replicas))


class LeastLoadedRouter:
    """The replica with the fewest requests under way; of equals, that with the fewest prompt tokens."""

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Look at all of them."""
        return min(range(len(replicas)), key=lambda index: _load(replicas, index))


class FirstFitRouter:
    """The first replica with a free seat: fills one after the other, so that the last ones could be switched off.

    Args:
        max_num_seqs: Seats of a replica. When all are taken, the least loaded gets the request.

    Source: the bin packing that Punica uses to consolidate, and CaraServe compares with.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Go from the first on."""
        for index, replica in enumerate(replicas):
            if replica.num_requests < self._max_num_seqs:
                return index
        return min(range(len(replicas)), key=lambda index: _load(replicas, index))


class PowerOfTwoRouter:
    """The less loaded of two that chance picks: nearly as even as looking at all, and no herd forms.

    Args:
        rng: Its chance.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Look at two of them."""
        if len(replicas) == 1:
            return 0
        return min(self._rng.sample(range(len(replicas)), 2), key=lambda index: _load(replicas, index))


class AffinityRouter:
    """The replica that an adapter belongs to; the next in the adapter's own order while that one is overloaded.

    Every adapter orders the replicas by a hash of both names (rendezvous hashing): another replica takes over its fair
    share and moves nothing else. A replica is passed over while it has ``overload`` times its share of what is under
    way, so a popular adapter spreads over as many as it needs, always the same ones. Requests for the base have nothing
    to be near to, and go where load is least.

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
        """Go down the adapter's order to the first replica with room; there always is one below the mean."""
        if request.model in ("", self._base_name):
            return min(range(len(replicas)), key=lambda index: _load(replicas, index))
        num_requests = 1 + sum(replica.num_requests for replica in replicas)
        most = math.ceil(self._overload * num_requests / len(replicas))
        return next(index for index in self._order(request.model, len(replicas)) if replicas[index].num_requests < most)

    def _order(self, adapter: str, num_replicas: int) -> tuple[int, ...]:
        """Return the replicas in the order of an adapter; hashes are taken once."""
        order = self._orders.get((adapter, num_replicas))
        if order is None:
            order = tuple(sorted(range(num_replicas), key=lambda index: _rank(adapter, index)))
            self._orders[adapter, num_replicas] = order
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterContext:
    """What a router may be told of the service it stands in front of.

    Args:
        rng: The chance of those that draw.
        base_name: The base model's name in requests.
        max_num_seqs: Requests that a replica runs at once.
        ranks: Rank of each adapter by name.
        steps: What steps take, where it is known.
        mean_answer_tokens: Usual length of an answer.
        tbt_s: Longest time between tokens that was promised, in seconds.
    """

    rng: Random
    base_name: str = ""
    max_num_seqs: int = 128
    ranks: Mapping[str, int] = field(default_factory=dict)
    steps: StepModel | None = None
    mean_answer_tokens: float = 200.0
    tbt_s: float | None = None


def _rank_aware(context: RouterContext) -> Router:
    if context.steps is None:
        raise ConfigError("Router 'rank-aware' needs to know what steps take")
    return RankAwareRouter(
        context.steps, context.ranks, mean_answer_tokens=context.mean_answer_tokens, tbt_s=context.tbt_s
    )


ROUTERS: dict[str, Callable[[RouterContext], Router]] = {
    "affinity": lambda context: AffinityRouter(context.base_name),
    "first-fit": lambda context: FirstFitRouter(context.max_num_seqs),
    "least-loaded": lambda context: LeastLoadedRouter(),
    "power-of-two": lambda context: PowerOfTwoRouter(context.rng),
    "random": lambda context: RandomRouter(context.rng),
    "rank-aware": _rank_aware,
}


def make_router(name: str, context: RouterContext) -> Router:
    """Make a router by its name.

    Args:
        name: In ``ROUTERS``, or one of your own (``plugins.py``).
        context: What it may know.

    Raises:
        ConfigError: There is none of that name, or it needs the time of steps, which is unknown.
    """
    return made_by("router", name, find_factory("router", name, ROUTERS), context, seam=Router)


def _load(replicas: Seq[ReplicaLoad], index: int) -> tuple[int, int, int]:
    return replicas[index].num_requests, replicas[index].num_prompt_tokens, index


def _rank(adapter: str, replica: int) -> bytes:
    return blake2b(f"{replica}/{adapter}".encode(), digest_size=8).digest()
