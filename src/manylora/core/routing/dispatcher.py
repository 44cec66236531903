"""The dispatcher: a router, and the view of every replica that it decides by."""

from __future__ import annotations

from collections.abc import Container, Mapping

from manylora.core.routing.prefixes import SentPrefixes, token_blocks
from manylora.core.routing.router import Router
from manylora.core.routing.view import AnswerLengths, ReplicaReport, ReplicaView, Sent
from manylora.core.types import Request

__all__ = ["Dispatcher"]


class Dispatcher:
    """Chooses replicas and keeps their ``views``, by index; it reads no clock and waits for nothing.

    An adapter that has no rank counts as the base. ``caches_prefixes`` is whether replicas keep the KV of finished
    prompts.
    """

    def __init__(
        self,
        router: Router,
        num_replicas: int,
        ranks: Mapping[str, int] | None = None,
        *,
        caches_prefixes: bool = True,
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
