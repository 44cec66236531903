"""A sequence: a request's state in the engine.

Only its own methods change it: each records one event and leaves it consistent. All other code reads its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from manylora.memory import BlockTable
from manylora.plan import ARRIVING, ON_DEVICE, Placement, PlannedSequence
from manylora.types import AdapterKey, AdapterVersion, FinishReason, Request

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Sequence:
    """One request in the engine.

    ::

        WAITING --admitted--> RUNNING --launched--> in flight --took_token--> ... --finished--> FINISHED
           ^                     |
           +----- sent_back -----+

        tokens   | prompt ....................... | generated ... | pending |
                 0        num_computed                                  num_tokens
                 |-- KV in pages --|------ to run (1 when decoding) ------|

    Tokens count as computed from the launch of the step that runs them. The token that a step in flight will yield is
    *pending*, so that the next step can be planned meanwhile.

    Args:
        seq_id: Unique for the life of the engine; also the order of arrival.
        version: The adapter version it was resolved to on arrival, ``None`` for the base.
        name: The registered name of that adapter, empty for the base.
        table: Its block table, empty.
        max_tokens: Most tokens to generate.
        seed: Seed of its sampling.
        arrived_at: Seconds on the loop's clock.
        reserves_output: Whether it claims pages for its longest answer when it is admitted.
    """

    seq_id: int
    request: Request
    version: AdapterVersion | None
    name: str = ""
    table: BlockTable
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    arrived_at: float
    reserves_output: bool = False
    adapter: AdapterKey | None = field(init=False)
    rank: int = field(init=False)  # of its adapter; 0 for the base
    placement: Placement = field(default=ON_DEVICE, init=False)  # of its adapter's weights, while it runs
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    tokens: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    num_pending: int = field(default=0, init=False)  # tokens that steps in flight will yield
    num_in_flight: int = field(default=0, init=False)  # steps in flight that it is part of
    num_cached: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_shared_pages: int = field(default=0, init=False)  # found in the prefix cache when it was admitted
    num_bypassed: int = field(default=0, init=False)
    admitted_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    ending: FinishReason | None = field(default=None, init=False)  # it ends with the steps in flight, for this reason
    error: str | None = field(default=None, init=False)
    was_looked_at: bool = field(default=False, init=False)
    awaited_load: int = field(default=0, init=False)  # number of the last load of its adapter that it waited for
    found_resident: bool = field(init=False)

    def __post_init__(self) -> None:
        self.adapter = self.version.key if self.version else None
        self.rank = self.version.rank if self.version else 0
        self.tokens = list(self.request.prompt)
        self.num_prompt_tokens = len(self.tokens)
        self.found_resident = self.version is None

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.status.value}, {self.num_computed}/{len(self.tokens)} computed)"

    @property
    def num_tokens(self) -> int:
        """Its tokens, pending ones included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_to_run(self) -> int:
        """Tokens whose KV is missing."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def is_ending(self) -> bool:
        """Whether it will not run again, for any result of the steps in flight: ended, about to end, or at its cap."""
        return (
            self.ending is not None
            or self.status is SequenceStatus.FINISHED
            or len(self.tokens) + self.num_pending - self.num_prompt_tokens >= self.max_tokens
        )

    @property
    def has_sound_kv(self) -> bool:
        """Whether the KV of completed steps is certain to be right: not if the adapter's load may fail yet, or did."""
        return self.placement is not ARRIVING and self.error is None

    @property
    def num_tokens_to_hold(self) -> int:
        """Tokens it needs pages for when it is admitted; the last token generated needs no KV."""
        return self.num_prompt_tokens + self.max_tokens - 1 if self.reserves_output else len(self.tokens)

    @property
    def num_adapter_pages(self) -> int:
        """Pages its adapter takes on the device."""
        return self.version.num_pages if self.version else 0

    # -- while it waits ----------------------------------------------------------------------------------------------

    def passed(self) -> None:
        """A younger sequence was admitted before it."""
        self.num_bypassed += 1

    def looked_at(self, *, is_resident: bool) -> bool:
        """Its adapter was looked up; return whether for the first time, which counts as hit or miss."""
        if self.was_looked_at:
            return False
        self.was_looked_at = True
        self.found_resident = is_resident
        return True

    def awaited(self, load: int) -> None:
        """It waits only for the load of its adapter with this number."""
        self.awaited_load = load

    def admitted(self, now: float, *, shared: Seq[int], pages: Seq[int], placement: Placement = ON_DEVICE) -> bool:
        """It starts to run; return whether for the first time.

        Args:
            now: In seconds.
            shared: Pages of its prefix whose KV is computed.
            pages: Pages for the rest of its tokens.
            placement: Where its adapter's weights are.
        """
        self.table.adopt(shared)
        self.table.grow(pages)
        self.num_shared_pages = len(shared)
        self.num_computed = len(shared) * self.table.block_size
        self.placement = placement
        self.status = SequenceStatus.RUNNING
        if self.admitted_at is not None:
            return False
        self.admitted_at = now
        self.num_cached = self.num_computed
        return True

    # -- while it runs -----------------------------------------------------------------------------------------------

    def launched(self, num_tokens: int) -> PlannedSequence:
        """``num_tokens`` of its tokens run in the next step; return its part of that step's plan."""
        tokens, start, num_pending = self.tokens, self.num_computed, self.num_pending
        self.num_computed = end = start + num_tokens
        self.num_in_flight += 1
        is_sampled = end == len(tokens) + num_pending
        if is_sampled:
            self.num_pending = num_pending + 1
        return PlannedSequence(
            seq_id=self.seq_id,
            tokens=tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            start=start,
            num_tokens=num_tokens,
            pages=self.table.pages,
            adapter=self.adapter,
            rank=self.rank,
            sampling=self.request.sampling,
            is_sampled=is_sampled,
            seed=self.seed,
            awaits_token=num_pending > 0,
            placement=self.placement,
        )

    def moved(self, placement: Placement) -> None:
        """Its adapter's weights have moved."""
        self.placement = placement

    def took_chunk(self) -> None:
        """A step ran a part of its prompt and yielded no token."""
        self.num_in_flight -= 1

    def took_token(self, token_id: int, now: float) -> bool:
        """A step yielded its next token; return whether it is kept: not after the sequence ended or was cancelled."""
        self.num_in_flight -= 1
        self.num_pending -= 1
        if self.ending is not None or self.status is SequenceStatus.FINISHED:
            return False
        self.tokens.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        return True

    def took_nothing(self) -> None:
        """A step was to yield its next token, and did not: it has failed."""
        assert self.error is not None
        self.num_in_flight -= 1
        self.num_pending -= 1

    def sent_back(self) -> None:
        """It waits again without its pages; its tokens are kept, and their KV is computed again."""
        self.num_preemptions += 1
        self.num_computed = 0
        self.status = SequenceStatus.WAITING

    def cancelled(self) -> None:
        """Its client has left: it ends with the steps in flight."""
        self.ending = self.ending or FinishReason.CANCELLED

    def failed(self, error: str) -> None:
        """Its adapter cannot be applied: it ends with the steps in flight."""
        self.ending = self.ending or FinishReason.ERROR
        self.error = self.error or f"adapter {self.name!r}: {error}"

    def finished(self) -> None:
        """It has ended."""
        self.status = SequenceStatus.FINISHED
