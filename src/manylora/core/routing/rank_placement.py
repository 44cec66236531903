"""Placement by rank: adapters are dealt out to replicas in order of rank, in proportion to the time that they cost.

::

    replicas            |------ 0 ------|------ 1 ------|------ 2 ------|       equal shares of the time
    adapters by rank    | 64 |  64 | 32   . 32 | 16 | 16  .   8 | 8 | 8 |       a share may end inside an adapter

Ranks of one replica are nearly alike, so that under padded kernels few rows pay for another row's rank. Time is that
of the requests so far, fading, by a replica's own step-time model at that rank. Shares are dealt out anew every
``PERIOD`` requests, over the replicas that can serve. A request of an adapter with parts on several replicas goes to
one of them by chance, in proportion.

Source: LoRAServe (Jaiswal et al., arXiv 2511.22880): workload-aware placement and routing for adapters of different
ranks, rebalanced as demand drifts. Its abstract, from which this was made, has no algorithm. Adapters there move
between devices over RDMA; here the new replica loads one when it is first asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from random import Random

from manylora.core.routing.router import least_loaded
from manylora.core.routing.view import ReplicaView
from manylora.core.types import Request

__all__ = ["RankPlacementRouter"]

PERIOD = 256  # requests between two placements
FADE = 0.5  # of demand, from one placement to the next
LEAST_S = 1e-3  # demand that is forgotten
BATCH = 32  # sequences that a decode step's fixed cost is divided by

Parts = list[tuple[int, float]]  # replicas of an adapter, each with the end of its part in [0, 1]


class RankPlacementRouter:
    """The replica that holds the request's part of its adapter; for the base and new adapters the least loaded."""

    def __init__(self, ranks: Mapping[str, int], rng: Random) -> None:
        self._ranks = ranks
        self._rng = rng
        self._demand: dict[str, float] = {}  # seconds of each adapter
        self._parts: dict[str, Parts] = {}
        self._placed: tuple[int, ...] = ()  # the replicas that were dealt out to
        self._num_left = PERIOD

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Count the request, place anew when it is time, and look its replica up."""
        rank = self._ranks.get(request.model, 0)
        if rank:
            time_s = _time_s(replicas[among[0]], len(request.prompt), rank)
            self._demand[request.model] = self._demand.get(request.model, 0.0) + time_s
        self._num_left -= 1
        if self._num_left <= 0 or self._placed != tuple(among):
            self._place(among)
        parts = self._parts.get(request.model)
        if parts is None:
            return least_loaded(replicas, among)
        draw = self._rng.random()
        return next(replica for replica, end in parts if draw < end)

    def _place(self, among: Seq[int]) -> None:
        costs = [(self._ranks[name], name, time_s) for name, time_s in self._demand.items() if name in self._ranks]
        self._parts = deal(sorted(costs, reverse=True), among)
        if self._num_left <= 0:
            self._demand = {name: time_s * FADE for name, time_s in self._demand.items() if time_s >= LEAST_S}
        self._placed, self._num_left = tuple(among), PERIOD


def _time_s(view: ReplicaView, num_tokens: int, rank: int) -> float:
    """Return the time that a request takes of a full replica of its own rank, in seconds."""
    steps = view.steps
    token_s = steps.step_s / BATCH + steps.request_s + steps.rank_s * rank
    return num_tokens * (sum(steps.token_s) + steps.token_rank_s * rank) + view.mean_answer_tokens * token_s


def deal(costs: Seq[tuple[int, str, float]], among: Seq[int]) -> dict[str, Parts]:
    """Cut adapters, as (rank, name, cost) in order, into equal shares; return each one's parts."""
    share = sum(cost for _, _, cost in costs) / len(among)
    parts: dict[str, Parts] = {}
    place, room = 0, share
    for _, name, cost in costs:
        own: Parts = []
        left = cost
        while left > room and place + 1 < len(among):
            left -= room
            if room > 0.0:
                own.append((among[place], 1.0 - left / cost))
            place, room = place + 1, share
        room -= left
        parts[name] = [*own, (among[place], 1.0)]
    return parts
