"""A sequence: a request's state in the engine."""

from __future__ import annotations

from enum import Enum

from manylora.memory import BlockTable
from manylora.types import AdapterKey, AdapterVersion, Request

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request on its way.

    ::

        tokens   | prompt ....................... | generated ... | pending |
                 0        num_computed                                  num_tokens
                 |-- KV in pages --|------ to run (1 when decoding) ------|

    Tokens count as computed from the launch of the step that runs them, and those it will yield are *pending* until it
    has: so the step after it can be planned meanwhile.

    Args:
        seq_id: Unique for the life of the engine; also the order of arrival.
        request: What was asked for.
        version: The adapter version it was resolved to on arrival, ``None`` for the base.
        name: The registered name it was asked by, empty for the base.
        table: Its block table, empty.
        max_tokens: Most tokens to generate.
        stop_token_ids: Tokens that end it.
        seed: What its draws are keyed by.
        arrived_at: Seconds on the loop's clock.
        reserves_output: Whether it claims pages for its longest answer when it is admitted.
    """

    __slots__ = (
        "adapter",
        "admitted_at",
        "arrived_at",
        "awaited_load",
        "first_token_at",
        "found_resident",
        "is_cancelled",
        "max_tokens",
        "name",
        "num_bypassed",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_shared_pages",
        "request",
        "reserves_output",
        "seed",
        "seq_id",
        "status",
        "stop_token_ids",
        "table",
        "tokens",
        "version",
        "was_looked_at",
    )

    def __init__(
        self,
        *,
        seq_id: int,
        request: Request,
        version: AdapterVersion | None,
        name: str = "",
        table: BlockTable,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        seed: int,
        arrived_at: float,
        reserves_output: bool = False,
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.version = version
        self.adapter: AdapterKey | None = version.key if version else None
        self.name = name
        self.table = table
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.arrived_at = arrived_at
        self.reserves_output = reserves_output
        self.status = SequenceStatus.WAITING
        self.tokens: list[int] = list(request.prompt)
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed = 0
        self.num_pending = 0  # tokens that steps in flight will yield
        self.num_in_flight = 0  # steps in flight that it is part of
        self.num_cached = 0
        self.num_preemptions = 0
        self.num_shared_pages = 0  # found in the prefix cache when it was admitted
        self.num_bypassed = 0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.is_cancelled = False
        self.was_looked_at = False
        self.awaited_load = 0  # the number of the last load of its adapter that it waited for
        self.found_resident = version is None

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
        """Whether it will run no more, whatever the steps in flight yield: it is over, cancelled or at its longest."""
        return (
            self.is_cancelled
            or self.status is SequenceStatus.FINISHED
            or len(self.tokens) + self.num_pending - self.num_prompt_tokens >= self.max_tokens
        )

    @property
    def num_tokens_to_hold(self) -> int:
        """Tokens it needs pages for when it is admitted; the last token generated needs no KV."""
        return self.num_prompt_tokens + self.max_tokens - 1 if self.reserves_output else len(self.tokens)

    @property
    def num_adapter_pages(self) -> int:
        """Pages its adapter takes on the device."""
        return self.version.num_pages if self.version else 0
