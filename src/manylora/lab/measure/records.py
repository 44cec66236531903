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
    """One request, from its arrival to its end; times in seconds on the run's clock.

    Args:
        adapter: Name of the adapter; empty for the base.
        rank: Its rank; 0 for the base, or where it is not known (a remote server).
        admitted_at: Start of its first step; ``None`` if it never ran or that is unknown.
        first_token_at: ``None`` if it got no token.
        max_gap_s: Longest time between two of its tokens; 0 with fewer than two.
        was_resident: Whether the scheduler found its adapter on the device at first; ``None`` for the base.
        adapter_wait_s: Seconds before its first token in which it waited for nothing but its adapter: the part of
            loading that delayed the first token.
        num_cached_tokens: Prompt tokens from the prefix cache.
        num_preemptions: Times it was pre-empted, squashes included.
        error: A message; ``None`` for a full answer.
        gaps_s: Seconds between its tokens, in order; empty where they were not kept.
    """

    request_id: str
    adapter: str
    rank: int
    num_prompt_tokens: int
    num_output_tokens: int
    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    finished_at: float
    max_gap_s: float = 0.0
    was_resident: bool | None = None
    adapter_wait_s: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_squashes: int = 0
    error: str | None = None
    replica: int = 0
    gaps_s: Seq[float] = ()

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
    """Every step; the columns are equally long.

    Args:
        took_s: Seconds from its launch to its results.
    """

    took_s: array[float] = field(default_factory=_COLUMN)
    num_sequences: array[float] = field(default_factory=_COLUMN)


@dataclass(slots=True)
class Loads:
    """Every load into one tier that succeeded; the columns are equally long.

    Args:
        at: Time of its end, in seconds.
        busy_s: Seconds that the link worked on it, without the time in the link's queue (first in, first out).
        num_bytes: Bytes that were moved.
    """

    at: array[float] = field(default_factory=_COLUMN)
    busy_s: array[float] = field(default_factory=_COLUMN)
    num_bytes: array[float] = field(default_factory=_COLUMN)


@dataclass(slots=True)
class Timeline:
    """One replica over time, as columns that are small enough to keep for hours.

    Args:
        gauges: A column for each of ``GAUGES``.
        loads: Loads by target tier.
        at: Time of each sample of the gauges, in seconds.
        queues: Requests waiting in each of the policy's queues, a row for each sample; the number of queues may change.
    """

    gauges: dict[str, array[float]]
    loads: dict[Tier, Loads]
    at: array[float] = field(default_factory=_COLUMN)
    queues: list[tuple[int, ...]] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
