"""The choice among backends by a policy of ``core/routing``: their slots, their load, a ticket for each request.

The load of a backend is the router's own count of the requests under way there, corrected by reports: requests that
others sent to it are added, and fade as the report grows old. The prompts that were sent to it tell which beginnings
its prefix cache is likely to hold. Callers share none, whatever their prompts. Other workers of the router tell what
they send where, which counts as the router's own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache

from manylora.core.routing import ReplicaReport, ReplicaView, Router
from manylora.core.routing.prefixes import PromptBlocks, SentPrefixes, text_blocks
from manylora.core.routing.view import AnswerLengths, Sent
from manylora.core.types import Request, SamplingParams
from manylora.route.backend import Backend
from manylora.route.outbox import Begun, WorkerOutbox
from manylora.route.report import BackendMetrics

__all__ = ["Choice", "PromptText", "Ticket"]

ROUND_TOKENS = 64
USUAL_RANK = 16  # rank of an adapter whose rank no backend reports
MOST_RANKS = 200_000  # ranks that are kept: adapters come and go, and backends say their names


@dataclass(slots=True, eq=False)
class PromptText:
    """The prompt of a request as its body has it: text or token ids in JSON, cut into blocks when that is asked for."""

    beginning: bytes  # its first ``MOST_BYTES``, until it is cut
    num_bytes: int  # its whole length
    num_tokens: int  # as estimated
    salt: bytes = b""  # prompts share blocks only under equal salts
    _blocks: PromptBlocks | None = None

    def blocks(self, model: str) -> PromptBlocks:
        """Return its blocks for a model, which is always the same."""
        if self._blocks is None:
            self._blocks = text_blocks(model, self.salt, self.beginning, self.num_bytes, self.num_tokens)
            self.beginning = b""
        return self._blocks


class Ticket:
    """A request that counts at a backend until it is returned."""

    __slots__ = ("_outbox", "_serial", "is_open", "member", "sent")

    def __init__(self, member: Backend, sent: Sent, outbox: WorkerOutbox | None = None, blocks: Seq[int] = ()) -> None:
        self.member = member
        self.is_open = True
        self.sent = sent
        member.view.add(sent)
        self._outbox = outbox  # tells other workers; ``None`` for none
        self._serial = 0 if outbox is None else outbox.begun(member.url, sent, blocks)

    def started(self) -> None:
        """Learn that the answer has begun: the prompt has run."""
        if self.is_open:
            self.member.view.start(self.sent)
            if self._outbox is not None:
                self._outbox.started(self._serial)

    def end(self) -> None:
        """Count the request out; once is enough, and twice is the same."""
        if self.is_open:
            self.is_open = False
            self.member.view.remove(self.sent)
            if self._outbox is not None:
                self._outbox.ended(self._serial)


@dataclass(eq=False)
class Choice:
    """Chooses among backends that come and go.

    A backend keeps its slot, and another takes it over when it is gone: routers know backends by their place, and
    adapters should not move when an unrelated backend leaves.
    """

    router: Router  # chooses by place
    ranks: MutableMapping[str, int]  # rank by adapter, as reported so far; a missing one counts as the base
    outbox: WorkerOutbox | None = None  # tells the other workers of the router; ``None`` for none
    _slots: list[Backend | None] = field(default_factory=list)
    _by_url: dict[str, Backend] = field(default_factory=dict)
    _views: list[ReplicaView] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)  # of all backends
    _prefixes: SentPrefixes = field(default_factory=SentPrefixes)
    _answers: AnswerLengths = field(default_factory=AnswerLengths)

    def join(self, member: Backend) -> None:
        """Give a backend a slot."""
        if None in self._slots:
            self._slots[self._slots.index(None)] = member
        else:
            self._slots.append(member)
        self._prefixes.join(member.view)
        self._number()

    def leave(self, member: Backend) -> None:
        """Free a backend's slot; when more than a quarter of the slots are free, the others move up."""
        self._slots = [None if other is member else other for other in self._slots]
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
        if 4 * self._slots.count(None) > len(self._slots):
            self._slots = [other for other in self._slots if other is not None]
        self._prefixes.leave(member.view)
        self._number()

    def returned(self, member: Backend) -> None:
        """Learn that a backend came up: it may be another process, which holds no adapter and no prefix."""
        member.view.forget()
        self._prefixes.forget(member.view)

    def choose(self, model: str, prompt: PromptText, available: Seq[Backend]) -> Ticket:
        """Choose among the ``available`` backends, at least one, and count the request there.

        The ``model`` is the adapter's name, empty for the base.
        """
        if model and model not in self.ranks:
            self.learn_ranks({model: USUAL_RANK})
        chosen, num_cached, hashes = available[0], 0, []
        if len(self._slots) > 1:
            blocks = prompt.blocks(model)
            self._prefixes.expect(blocks)
            if len(available) > 1:
                chosen = self._chosen(model, prompt.num_tokens, available)
            num_cached = chosen.view.cached_tokens
            self._prefixes.note(chosen.view, blocks)
            hashes = blocks.hashes
        sent = Sent(
            replica=0,
            adapter=model or None,
            rank=self.ranks.get(model, 0),
            num_prompt_tokens=prompt.num_tokens,
            num_cached_tokens=num_cached,
        )
        return Ticket(chosen, sent, self.outbox, hashes)

    def count(self, begun: Begun) -> Ticket | None:
        """Count a request that another worker has sent; return its ticket, ``None`` for a backend unknown here."""
        member = self._by_url.get(begun.url)
        if member is None:
            return None
        self._prefixes.note(member.view, PromptBlocks(begun.blocks, 0.0, begun.num_prompt_tokens))
        return Ticket(
            member,
            Sent(
                replica=0,
                adapter=begun.adapter,
                rank=begun.rank,
                num_prompt_tokens=begun.num_prompt_tokens,
                num_cached_tokens=begun.num_cached_tokens,
            ),
        )

    def places(self) -> list[str | None]:
        """Return the URL of the backend in each slot; ``None`` in a free one."""
        return [None if member is None else member.url for member in self._slots]

    def arrange(self, places: Seq[str | None]) -> None:
        """Give backends the slots that they have in another worker, so that adapters have the same order there."""
        left = dict(self._by_url)
        self._slots = [None if url is None else left.pop(url, None) for url in places]
        self._slots += left.values()
        self._number()

    def _chosen(self, model: str, num_tokens: int, available: Seq[Backend]) -> Backend:
        prompt = _prompt(-(-num_tokens // ROUND_TOKENS))
        request = Request(request_id="", prompt=prompt, model=model, sampling=_DEFAULTS)
        among = self._places
        if len(available) < len(among):
            among = sorted([member.place for member in available])
        member = self._slots[self.router.choose(request, self._views, among)]
        assert member is not None
        return member

    def _number(self) -> None:
        self._by_url = {member.url: member for member in self._slots if member is not None}
        self._places = [place for place, member in enumerate(self._slots) if member is not None]
        for place, member in enumerate(self._slots):
            if member is not None:
                member.place = place
        self._views = [_EMPTY if member is None else member.view for member in self._slots]

    def learn_ranks(self, ranks: Mapping[str, int]) -> None:
        """Learn the ranks of adapters; once there are too many, ranks of earlier reports are forgotten."""
        if len(self.ranks) + len(ranks) > MOST_RANKS:
            self.ranks.clear()
        self.ranks.update(ranks)

    def correct(self, member: Backend, num_own: int, metrics: BackendMetrics | None) -> None:
        """Take in a backend's report; ``None`` for none, which halves the correction.

        ``num_own`` are the requests of this router that were there when it was asked.
        """
        view, report, num_reported = member.view, ReplicaReport(), None
        if metrics is not None:
            report = ReplicaReport(
                resident=metrics.on_device,
                num_queued=metrics.num_waiting,
                kv_usage=metrics.kv_usage,
                steps=member.times.learn(metrics, view),
                num_answers=metrics.num_answers,
                num_answer_tokens=metrics.num_answer_tokens,
            )
            num_reported = metrics.num_requests
            self._answers.count(view, report)
        view.num_foreign = view.num_foreign // 2 if num_reported is None else max(0, num_reported - num_own)
        view.learn(report)
        for one in self._views:
            one.guess(report.steps, self._answers.mean)


_EMPTY = ReplicaView()
_DEFAULTS = SamplingParams()


@lru_cache(maxsize=512)
def _prompt(num_rounds: int) -> tuple[int, ...]:
    """Return a prompt of a length: routers look at nothing else of it."""
    return (0,) * (min(num_rounds, 4096) * ROUND_TOKENS)
