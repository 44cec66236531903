"""The interface of routing policies, the parts that several share, and the dispatcher, which keeps their views."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from manylora.core.options import CheckedOptions, option
from manylora.core.routing.prefixes import SentPrefixes, token_blocks
from manylora.core.routing.view import AnswerLengths, ReplicaReport, ReplicaView, Sent
from manylora.core.types import Request

__all__ = ["Dispatcher", "Rendezvous", "Router", "SloOptions", "least_loaded"]


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


class Dispatcher:
    """Chooses replicas and keeps their ``views``, by index; it reads no clock and waits for nothing.

    An adapter that has no rank counts as the base. ``caches_prefixes`` is whether replicas keep the KV of finished
    prompts.
    """

    def __init__(
        self, router: Router, num_replicas: int, ranks: Mapping[str, int] | None = None, *, caches_prefixes: bool = True
    ) -> None:
        assert num_replicas >= 1
        self._router = router
        self._ranks = {} if ranks is None else ranks
        self.views = [ReplicaView() for _ in range(num_replicas)]
        self._every = range(num_replicas)
        self._in_flight: dict[str, Sent] = {}
        self._answers = AnswerLengths()
        self._prefixes = SentPrefixes() if caches_prefixes else None
        if self._prefixes is not None:
            for view in self.views:
                self._prefixes.join(view)

    def dispatch(self, request: Request, serving: Container[int] | None = None, num_answered: int | None = None) -> int:
        """Return the replica for a request, and count it there until ``ended``. The router is asked once.

        Args:
            request: The request.
            serving: The replicas that can take it, at least one; all when ``None``.
            num_answered: Tokens of its answer so far, if it was at a replica that was lost; ``None`` for a new one.
        """
        among = self._every if serving is None else [index for index in self._every if index in serving]
        if self._prefixes is not None:
            blocks = token_blocks(request.model, request.cache_salt, request.prompt)
            self._prefixes.expect(blocks)
        replica = self._router.choose(request, self.views, among)
        assert replica in among, f"the router chose {replica = }, expected one of {among}"
        rank, view = self._ranks.get(request.model), self.views[replica]
        sent = Sent(
            replica=replica,
            adapter=None if rank is None else request.model,
            rank=rank or 0,
            num_prompt_tokens=len(request.prompt) + (num_answered or 0),
            num_cached_tokens=view.cached_tokens,
        )
        self._in_flight[request.request_id] = sent
        view.add(sent)
        if self._prefixes is not None:
            self._prefixes.note(view, blocks)
        return replica

    def started(self, request_id: str) -> None:
        """Learn that a request has its first token; a request that is not in flight is ignored."""
        sent = self._in_flight.get(request_id)
        if sent is not None:
            self.views[sent.replica].start(sent)

    def ended(self, request_id: str) -> int:
        """Learn that a request ended or was refused; return its replica."""
        sent = self._in_flight.pop(request_id)
        self.views[sent.replica].remove(sent)
        return sent.replica

    def report(self, replica: int, report: ReplicaReport) -> None:
        """Learn a replica's own account, at any interval.

        Replicas without a step-time model of their own are taken to be as fast as the one that reported last.
        """
        self.views[replica].learn(report)
        self._answers.count(self.views[replica], report)
        for view in self.views:
            view.guess(report.steps, self._answers.mean)

    def restarted(self, replica: int) -> None:
        """Learn that a replica's memory is empty: no adapter and no prefix is on its device any more."""
        view = self.views[replica]
        view.forget()
        if self._prefixes is not None:
            self._prefixes.forget(view)
