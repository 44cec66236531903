"""What a run showed, request by request: the one form that live, simulated and remote runs are reported from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

__all__ = ["RequestRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, from its arrival to its end; times in seconds on the run's clock.

    Args:
        request_id: Whose.
        adapter: Name of the adapter asked for; empty for the base.
        rank: Its rank; 0 for the base, or where it is not known (a remote server).
        num_prompt_tokens: Length of the prompt.
        num_output_tokens: Tokens it got.
        arrived_at: When it was asked.
        admitted_at: When it first ran; ``None`` if it never did or that is unknown.
        first_token_at: When its first token came; ``None`` if none did.
        finished_at: When it ended.
        max_gap_s: Longest time between two of its tokens; 0 with fewer than two.
        was_resident: Whether its adapter was on the device when it was first looked at; ``None`` for the base.
        adapter_wait_s: Seconds before its first token in which it waited for nothing but its adapter: the part of
            loading that its time to first token is longer by.
        num_cached_tokens: Prompt tokens from the prefix cache.
        num_preemptions: Times it had to give its pages back, squashes included.
        num_squashes: Times it was squashed.
        error: What went wrong, in words; ``None`` for a full answer.
        replica: Which replica served it.
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
