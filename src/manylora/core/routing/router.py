"""The interface of routing policies, and the parts that several of them share."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from manylora.core.options import CheckedOptions, option
from manylora.core.routing.view import ReplicaView
from manylora.core.types import Request

__all__ = ["Rendezvous", "Router", "SloOptions", "least_loaded"]

MOST_KEPT = 65_536  # orders that are kept: names come from clients, so there is no limit to their number


class Router(Protocol):
    """Chooses replicas. It gets its random generator on construction, and reads no clock."""

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Return the index of the replica that is to serve ``request``; asked once per request.

        Args:
            request: The request.
            replicas: All replicas, those included that are out for now.
            among: Indices of the replicas that can serve, rising; at least one. An outage should move only the requests
                of the replica that is out.
        """


def least_loaded(replicas: Seq[ReplicaView], among: Iterable[int]) -> int:
    """Return the replica with the fewest requests in flight; of equals, the one with the fewest prompt tokens."""
    return min(among, key=lambda index: (replicas[index].load, replicas[index].num_prompt_tokens, index))


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOptions(CheckedOptions):
    """The SLO of routers that predict the time between tokens."""

    tbt_s: float | None = option(None, unit="s", above=0, help="SLO of the time between tokens.")


class Rendezvous:
    """The replicas in the order of each adapter, by a hash of both names.

    A new replica takes over its fair share of adapters and moves no others.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[str, int], tuple[int, ...]] = {}
        self._hashers: list[blake2b] = []  # each has the number of a replica, and takes the name of an adapter

    def order(self, adapter: str, num_replicas: int) -> tuple[int, ...]:
        """Return the order of an adapter."""
        order = self._orders.get((adapter, num_replicas))
        if order is None:
            if len(self._orders) >= MOST_KEPT:
                self._orders.clear()
            encoded, weights = adapter.encode(), []
            while len(self._hashers) < num_replicas:
                self._hashers.append(blake2b(f"{len(self._hashers)}/".encode(), digest_size=8))
            for hasher in self._hashers[:num_replicas]:
                weight = hasher.copy()
                weight.update(encoded)
                weights.append(weight.digest())
            order = tuple(sorted(range(num_replicas), key=weights.__getitem__))
            self._orders[adapter, num_replicas] = order
        return order
