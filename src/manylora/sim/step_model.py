"""A line through a cost model: what a router may know of steps, read off a few made-up plans.

CaraServe fits its router's lines to profiles; where a cost model is at hand, so are the points to draw them through.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from manylora.engine.ports import PlannedSequence, StepPlan
from manylora.routing import StepModel
from manylora.sim.cost import CostModel
from manylora.types import AdapterKey, SamplingParams

__all__ = ["step_model"]

CONTEXT = 512
BATCH = 32
RANK, SMALL_RANK = 64, 8
PROMPT = 1024


def step_model(cost: CostModel) -> StepModel:
    """Return the line: its slopes over requests, ranks and prompt tokens, and whether kernels pad.

    Kernels pad if a batch of small ranks and one large costs nearer to the largest for all than to the sum.
    """

    def decode_s(ranks: Seq[int]) -> float:
        return cost.step_time_s(_plan([(1, rank) for rank in ranks]))

    def prompt_s(num_tokens: int, rank: int) -> float:
        return cost.step_time_s(_plan([(num_tokens, rank)]))

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


def _plan(parts: Seq[tuple[int, int]]) -> StepPlan:
    """Return a step of sequences, each so many tokens with an adapter of its own and of such a rank."""
    sampling = SamplingParams()
    return StepPlan(
        step_id=0,
        sequences=tuple(
            PlannedSequence(
                seq_id=index,
                tokens=range(CONTEXT + num_tokens),
                num_prompt_tokens=CONTEXT,
                start=CONTEXT if num_tokens == 1 else 0,
                num_tokens=num_tokens,
                pages=(),
                adapter=AdapterKey(str(index)) if rank else None,
                rank=rank,
                sampling=sampling,
                is_sampled=True,
                seed=0,
            )
            for index, (num_tokens, rank) in enumerate(parts)
        ),
    )
