"""The linear step model of a router, computed from a cost model on a few synthetic plans.

CaraServe fits the lines of its router to profiles.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from manylora.costs.model import CostModel
from manylora.costs.synthetic_plan import Part, synthetic_plan
from manylora.routing import StepModel
from manylora.types import AdapterKey

__all__ = ["step_model"]

CONTEXT = 512
BATCH = 32
RANK, SMALL_RANK = 64, 8
PROMPT = 1024


def step_model(cost: CostModel) -> StepModel:
    """Return the slopes over requests, ranks and prompt tokens, and whether kernels pad.

    Kernels pad if the cost of a batch of small ranks and one large rank is nearer to the largest for all than to the
    sum.
    """

    def decode_s(ranks: Seq[int]) -> float:
        return cost.step_time_s(synthetic_plan(_part(CONTEXT, 1, index, rank) for index, rank in enumerate(ranks)))

    def prompt_s(num_tokens: int, rank: int) -> float:
        return cost.step_time_s(synthetic_plan([_part(0, num_tokens, 0, rank)]))

    alone_s, bare_s = decode_s([0]), decode_s([0] * (BATCH + 1))
    request_s = (bare_s - alone_s) / BATCH
    small_s, large_s = decode_s([SMALL_RANK] * BATCH), decode_s([RANK] * BATCH)
    rank_s = max(0.0, large_s - small_s) / (BATCH * (RANK - SMALL_RANK))
    mixed_s = decode_s([RANK] + [SMALL_RANK] * (BATCH - 1)) - small_s
    half_s, whole_s = prompt_s(PROMPT // 2, 0), prompt_s(PROMPT, 0)
    prompt_rank_s = prompt_s(PROMPT, RANK) - prompt_s(PROMPT, SMALL_RANK)
    return StepModel(
        step_s=max(0.0, alone_s - request_s),
        request_s=max(0.0, request_s),
        rank_s=rank_s,
        prompt_token_s=max(0.0, whole_s - half_s) / (PROMPT - PROMPT // 2),
        prompt_token_rank_s=max(0.0, prompt_rank_s) / (PROMPT * (RANK - SMALL_RANK)),
        is_padded=mixed_s > (large_s - small_s) / 2,
    )


def _part(start: int, num_tokens: int, index: int, rank: int) -> Part:
    """Return a sequence with an adapter of its own, or none where the rank is 0."""
    return Part(start, num_tokens, AdapterKey(str(index)) if rank else None, rank)
