"""The record of one request: live, simulated and remote runs are all reported from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

__all__ = ["RequestRecord"]


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
        adapter_wait_s: Seconds before its first token in which it waited for its adapter alone: the part of loading
            that delayed the first token.
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
