"""The choice among backends by a policy of ``core/routing``: their slots, their load, a ticket for each request.

The load of a backend is the router's own count of the requests under way there, corrected by reports: requests that
others sent to it are added, and fade as the report grows old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from collections.abc import Sequence as Seq
from functools import lru_cache

from manylora.core.routing import ReplicaReport, ReplicaView, Router
from manylora.core.routing.view import Sent
from manylora.core.types import Request
from manylora.route.backend import Backend

__all__ = ["Choice", "Ticket"]

ROUND_TOKENS = 64
MOST_RANKS = 200_000
"""Ranks that are kept: adapters come and go, and backends say their names."""


class Ticket:
    """A request that counts at a backend until it is returned."""

    __slots__ = ("_sent", "is_open", "member")

    def __init__(self, member: Backend, sent: Sent) -> None:
        self.member = member
        self.is_open = True
        self._sent = sent
        member.view.add(sent)

    def started(self) -> None:
        """Learn that the answer has begun: the prompt has run."""
        if self.is_open:
            self.member.view.start(self._sent)

    def end(self) -> None:
        """Count the request out; once is enough, and twice is the same."""
        if self.is_open:
            self.is_open = False
            self.member.view.remove(self._sent)


class Choice:
    """Chooses among backends that come and go.

    A backend keeps its slot, and another takes it over when it is gone: routers know backends by their place, and
    adapters should not move when an unrelated backend leaves.

    Args:
        router: Chooses by place.
        ranks: Rank by adapter, as reported so far; a missing one counts as the base.
    """

    def __init__(self, router: Router, ranks: MutableMapping[str, int]) -> None:
        self._ranks = ranks
        self._router = router
        self._slots: list[Backend | None] = []

    def join(self, member: Backend) -> None:
        """Give a backend a slot."""
        for place, other in enumerate(self._slots):
            if other is None:
                self._slots[place] = member
                return
        self._slots.append(member)

    def leave(self, member: Backend) -> None:
        """Free a backend's slot; when more than a quarter of the slots are free, the others move up."""
        self._slots = [None if other is member else other for other in self._slots]
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
        if 4 * self._slots.count(None) > len(self._slots):
            self._slots = [other for other in self._slots if other is not None]

    def choose(self, model: str, num_prompt_tokens: int, available: Seq[Backend]) -> Ticket:
        """Choose a backend among the ``available``, of which there is at least one, and count the request there.

        Args:
            model: The adapter; empty for the base.
            num_prompt_tokens: Length of the prompt, as estimated.
            available: The backends that can take the request.
        """
        ids = {id(member) for member in available}
        among = [place for place, member in enumerate(self._slots) if id(member) in ids]
        chosen = available[0]
        if len(among) > 1:
            request = Request(request_id="", prompt=_prompt(-(-num_prompt_tokens // ROUND_TOKENS)), model=model)
            views = [_EMPTY if member is None else member.view for member in self._slots]
            member = self._slots[self._router.choose(request, views, among)]
            assert member is not None
            chosen = member
        sent = Sent(
            replica=0, adapter=model or None, rank=self._ranks.get(model, 0), num_prompt_tokens=num_prompt_tokens
        )
        return Ticket(chosen, sent)

    def learn_ranks(self, ranks: Mapping[str, int]) -> None:
        """Learn the ranks of adapters; once there are too many, ranks of earlier reports are forgotten."""
        if len(self._ranks) + len(ranks) > MOST_RANKS:
            self._ranks.clear()
        self._ranks.update(ranks)

    def correct(
        self, member: Backend, num_reported: int | None, num_own: int, resident: Iterable[str] | None = None
    ) -> None:
        """Take in a report of a backend.

        Args:
            member: The backend.
            resident: Adapters that it says are on its device; ``None`` if it does not say.
            num_reported: Requests that it says it has; ``None`` for no report, which halves the correction.
            num_own: Requests of this router that were there when it was asked.
        """
        view = member.view
        foreign = view.num_foreign // 2 if num_reported is None else max(0, num_reported - num_own)
        view.learn(ReplicaReport(resident=resident))
        view.num_foreign = foreign


_EMPTY = ReplicaView()


@lru_cache(maxsize=512)
def _prompt(num_rounds: int) -> tuple[int, ...]:
    """Return a prompt of a length: routers look at nothing else of it."""
    return (0,) * (min(num_rounds, 4096) * ROUND_TOKENS)
