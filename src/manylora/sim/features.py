"""What a step's time depends on, read off its plan in one pass.

A simulated run prices a hundred thousand steps, so this loop is all that grows with the batch: every model of
cost, from first principles or fitted, is a function of these few sums.
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.engine.ports import StepPlan
from manylora.types import AdapterKey

__all__ = ["StepFeatures", "step_features"]


class StepFeatures(NamedTuple):
    """Sums over the sequences of a step; *adapted* ones are those with an adapter.

    Args:
        num_sequences: Sequences.
        num_sampled: Of them, those that yield a token (and so go through the head).
        num_tokens: Tokens that go through the layers.
        num_context_tokens: Tokens of KV that are read: each sequence's context, these tokens included.
        num_scores: Pairs of a token and one it attends to.
        num_adapted: Adapted sequences.
        num_adapted_tokens: Their tokens.
        num_adapters: Distinct adapters.
        num_ranks: Distinct ranks.
        max_rank: Largest rank, 0 without adapters.
        sum_ranks: Ranks summed over distinct adapters: what is read when rows are sorted by adapter.
        sum_sequence_ranks: Ranks summed over adapted sequences: what is read when each fetches its own.
        sum_token_ranks: Ranks summed over adapted tokens: what is computed without padding.
    """

    num_sequences: int
    num_sampled: int
    num_tokens: int
    num_context_tokens: int
    num_scores: float
    num_adapted: int
    num_adapted_tokens: int
    num_adapters: int
    num_ranks: int
    max_rank: int
    sum_ranks: int
    sum_sequence_ranks: int
    sum_token_ranks: int


def step_features(plan: StepPlan) -> StepFeatures:
    """Return the sums that a step's time depends on."""
    tokens = contexts = sampled = adapted = adapted_tokens = sequence_ranks = token_ranks = 0
    scores = 0.0
    adapters: dict[AdapterKey, int] = {}
    for part in plan.sequences:
        num_tokens = part.num_tokens
        context = part.start + num_tokens
        tokens += num_tokens
        contexts += context
        scores += num_tokens * (context - 0.5 * (num_tokens - 1))
        if part.is_sampled:
            sampled += 1
        if part.adapter is not None:
            rank = part.rank
            adapters[part.adapter] = rank
            adapted += 1
            adapted_tokens += num_tokens
            sequence_ranks += rank
            token_ranks += rank * num_tokens
    ranks = adapters.values()
    return StepFeatures(
        len(plan.sequences),
        sampled,
        tokens,
        contexts,
        scores,
        adapted,
        adapted_tokens,
        len(adapters),
        len(set(ranks)),
        max(ranks, default=0),
        sum(ranks),
        sequence_ranks,
        token_ranks,
    )
