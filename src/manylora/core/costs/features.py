"""Features of a step, as sums over its plan: the inputs of fitted cost models and the content of step logs.

They are computed only from the plan, so the simulator and the live engine have the same features.
"""

from __future__ import annotations

import msgspec

from manylora.core.plan import ON_DEVICE, StepPlan
from manylora.core.types import AdapterKey

__all__ = ["StepFeatures", "step_features"]


class StepFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one step. A sequence with one token is a *decode*; a sequence with several is a *prompt* (a chunk)."""

    num_decodes: int  # decodes, of one token each
    num_prompts: int  # prompt chunks
    num_prompt_tokens: int  # tokens in prompt chunks
    num_sampled: int  # rows that yield a token
    context_tokens: int  # tokens of KV that decodes read, summed over them
    prompt_pairs: int  # pairs of query and key in prompts: ``n * s + n * (n + 1) / 2`` for ``n`` tokens behind ``s``
    num_adapters: int  # distinct adapters
    sum_rank: int  # sum of their ranks: reads of adapters, in units of the bytes of one rank
    max_rank: int  # largest rank, which padded kernels apply to every row
    num_adapted_decodes: int  # decodes with an adapter
    decode_row_rank: int  # sum of ranks over decodes: the adapters' arithmetic
    prompt_row_rank: int  # the same over prompt tokens
    prompt_context_tokens: int = 0  # tokens of KV that prompt chunks read, their own included
    num_adapted_prompts: int = 0  # prompt chunks with an adapter
    num_adapted_prompt_tokens: int = 0  # tokens in them
    # Sum of ranks over prompt chunks: reads of kernels in which every sequence reads its own adapter.
    prompt_rank: int = 0
    num_ranks: int = 0  # distinct ranks
    num_host_adapted: int = 0  # sequences whose adapter is read from host memory, whole or for layers not yet copied
    host_row_rank: int = 0  # sum of ranks over their tokens
    # 1 if its rows are other sequences' than those of the step before: a prompt runs, a sequence decodes for the first
    # time, or one has ended.
    is_changed: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return self.num_decodes + self.num_prompts

    @property
    def num_tokens(self) -> int:
        """Tokens in the step: the rows of every matrix product."""
        return self.num_decodes + self.num_prompt_tokens

    @property
    def num_adapted(self) -> int:
        """Sequences with an adapter."""
        return self.num_adapted_decodes + self.num_adapted_prompts

    @property
    def num_adapted_tokens(self) -> int:
        """Tokens with an adapter."""
        return self.num_adapted_decodes + self.num_adapted_prompt_tokens

    @property
    def row_rank(self) -> int:
        """Sum of ranks over tokens: the adapters' arithmetic without padding."""
        return self.decode_row_rank + self.prompt_row_rank

    @property
    def sequence_rank(self) -> int:
        """Sum of ranks over sequences: reads of kernels in which every sequence reads its own adapter."""
        return self.decode_row_rank + self.prompt_rank


def step_features(plan: StepPlan) -> StepFeatures:
    """Return a plan's features, in one pass because the simulator needs them every step."""
    num_decodes = num_prompt_tokens = num_sampled = context_tokens = prompt_pairs = 0
    num_adapted_decodes = decode_row_rank = prompt_row_rank = 0
    prompt_context_tokens = num_adapted_prompts = num_adapted_prompt_tokens = prompt_rank = 0
    num_host_adapted = host_row_rank = num_joined = 0
    ranks: dict[AdapterKey, int] = {}
    for part in plan.sequences:
        num_tokens, rank = part.num_tokens, part.rank
        num_sampled += part.is_sampled
        if part.adapter is not None:
            ranks[part.adapter] = rank
            if part.placement is not ON_DEVICE and part.placement != ON_DEVICE:
                num_host_adapted += 1
                host_row_rank += rank * num_tokens
        if num_tokens == 1:
            num_decodes += 1
            num_joined += part.start <= part.num_prompt_tokens
            context_tokens += part.start + 1
            decode_row_rank += rank
            num_adapted_decodes += part.adapter is not None
        else:
            num_prompt_tokens += num_tokens
            prompt_pairs += num_tokens * part.start + num_tokens * (num_tokens + 1) // 2
            prompt_context_tokens += part.start + num_tokens
            if part.adapter is not None:
                prompt_row_rank += num_tokens * rank
                num_adapted_prompts += 1
                num_adapted_prompt_tokens += num_tokens
                prompt_rank += rank
    for rows in plan.prompt_rows:
        num_sampled += rows.stop - rows.start
    return StepFeatures(
        num_decodes=num_decodes,
        num_prompts=len(plan.sequences) - num_decodes,
        num_prompt_tokens=num_prompt_tokens,
        num_sampled=num_sampled,
        context_tokens=context_tokens,
        prompt_pairs=prompt_pairs,
        num_adapters=len(ranks),
        sum_rank=sum(ranks.values()),
        max_rank=max(ranks.values(), default=0),
        num_adapted_decodes=num_adapted_decodes,
        decode_row_rank=decode_row_rank,
        prompt_row_rank=prompt_row_rank,
        prompt_context_tokens=prompt_context_tokens,
        num_adapted_prompts=num_adapted_prompts,
        num_adapted_prompt_tokens=num_adapted_prompt_tokens,
        prompt_rank=prompt_rank,
        num_ranks=len(set(ranks.values())),
        num_host_adapted=num_host_adapted,
        host_row_rank=host_row_rank,
        is_changed=int(num_joined > 0 or num_decodes < len(plan.sequences) or bool(plan.released)),
    )
