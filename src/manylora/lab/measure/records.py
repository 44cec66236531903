"""The records of a run: each request, and each replica over time.

Live, simulated and remote runs are all reported from the records of their requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from manylora.core.types import Tier

__all__ = ["GAUGES", "Loads", "RequestRecord", "Steps", "Timeline"]

GAUGES = (
    "num_running",
    "num_waiting",
    "num_free_pages",
    "num_kv_pages",
    "num_prefix_pages",
    "num_adapter_pages",
    "num_resident",
    "num_active",
)
"""The gauges of ``EngineStats`` that are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, from its arrival to its end; times in seconds on the run's clock."""

    request_id: str
    adapter: str  # name of the adapter; empty for the base
    rank: int  # its rank; 0 for the base, or where it is not known (a remote server)
    num_prompt_tokens: int
    num_output_tokens: int
    arrived_at: float
    admitted_at: float | None  # start of its first step; ``None`` if it never ran or that is unknown
    first_token_at: float | None  # ``None`` if it got no token
    finished_at: float
    max_gap_s: float = 0.0  # longest time between two of its tokens; 0 with fewer than two
    # Whether the scheduler found its adapter on the device at first; ``None`` for the base.
    was_resident: bool | None = None
    # Seconds before its first token in which it waited for nothing but its adapter: the part of loading that delayed
    # the first token.
    adapter_wait_s: float = 0.0
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache
    num_preemptions: int = 0  # times it was pre-empted, squashes included
    num_squashes: int = 0
    error: str | None = None  # a message; ``None`` for a full answer
    replica: int = 0
    gaps_s: Seq[float] = ()  # seconds between its tokens, in order; empty where they were not kept

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def e2e_s(self) -> float:
        """Time from arrival to the last token."""
        return self.finished_at - self.arrived_at

    @property
    def queueing_s(self) -> float | None:
        """Time from arrival to admission; ``None`` if it was never admitted, or that is unknown."""
        return None if self.admitted_at is None else self.admitted_at - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; ``None`` with fewer than two."""
        if self.first_token_at is None or self.num_output_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_output_tokens - 1)


_COLUMN: Callable[[], array[float]] = partial(array, "d")  # type: ignore[assignment]


@dataclass(slots=True)
class Steps:
    """Every step; the columns are equally long."""

    took_s: array[float] = field(default_factory=_COLUMN)  # seconds from its launch to its results
    num_sequences: array[float] = field(default_factory=_COLUMN)


@dataclass(slots=True)
class Loads:
    """Every load into one tier that succeeded; the columns are equally long."""

    at: array[float] = field(default_factory=_COLUMN)  # time of its end, in seconds
    # Seconds that the link worked on it, without the time in the link's queue (first in, first out).
    busy_s: array[float] = field(default_factory=_COLUMN)
    num_bytes: array[float] = field(default_factory=_COLUMN)  # bytes that were moved


@dataclass(slots=True)
class Timeline:
    """One replica over time, as columns that are small enough to keep for hours."""

    gauges: dict[str, array[float]]  # a column for each of ``GAUGES``
    loads: dict[Tier, Loads]  # loads by target tier
    at: array[float] = field(default_factory=_COLUMN)  # time of each sample of the gauges, in seconds
    # Requests waiting in each of the policy's queues, a row for each sample; the number of queues may change.
    queues: list[tuple[int, ...]] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
