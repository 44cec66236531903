"""The duration of a step as a line over its requests and the ranks of their adapters, for routers.

::

    decode    1, requests, context, X                 a step in which every sequence has one token
    prefill   1, tokens beyond 0, 64, 128, 256, context, X        a step with prompt tokens, decoding beside them

*Padded* kernels apply the largest rank of a step to every row: ``X`` is the rows with an adapter times that rank.
*Unpadded* kernels apply each row's own rank: ``X`` is the sum of ranks over rows. Steps of few tokens wait for the
reads of the base's weights and longer steps for arithmetic; the four terms over tokens follow that bend wherever it
lies.

Source: CaraServe, "Performance model". There the base of a step is constant; ours has terms for requests, context and
prompt tokens beside the rank, because one engine serves batches of every size.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRIOR", "TOKEN_KNOTS", "StepModel"]

_, SECOND, THIRD, FOURTH = TOKEN_KNOTS = (0, 64, 128, 256)
"""Tokens of a step at which the cost of one more token may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The cost of steps, in seconds: fitted by an engine, or a guess before its first steps."""

    step_s: float  # fixed cost of a decode step
    request_s: float  # cost of each sequence in it
    context_s: float  # cost of each token of KV that it reads
    rank_s: float  # cost of each unit of ``X`` in it
    is_padded: bool  # whether ``X`` of decode steps is padded
    prompt_step_s: float  # fixed cost of a step with prompt tokens
    token_s: tuple[float, ...]  # cost of one more token in it, beyond each of ``TOKEN_KNOTS``
    prompt_context_s: float  # cost of each token of KV that it reads
    token_rank_s: float  # cost of each unit of ``X`` in it
    is_prompt_padded: bool  # whether ``X`` of steps with prompts is padded

    def decode_s(self, num_requests: int, context: float, num_adapted: int, sum_rank: int, max_rank: int) -> float:
        """Return the duration of a decode step, whose sequences have ``context`` tokens of KV in all."""
        rank = num_adapted * max_rank if self.is_padded else sum_rank
        return self.step_s + self.request_s * num_requests + self.context_s * context + self.rank_s * rank

    def prefill_s(self, num_tokens: float, context: float, num_adapted: float, sum_rank: float, max_rank: int) -> float:
        """Return the duration of a step of ``num_tokens`` with prompts, which reads ``context`` of KV, its own too.

        ``sum_rank`` is over the ``num_adapted`` tokens with an adapter.
        """
        rank = num_adapted * max_rank if self.is_prompt_padded else sum_rank
        seconds = self.prompt_step_s + self.prompt_context_s * context + self.token_rank_s * rank
        first_s, second_s, third_s, fourth_s = self.token_s  # a router asks this of every replica: no loop
        seconds += first_s * num_tokens
        if num_tokens > SECOND:
            seconds += second_s * (num_tokens - SECOND)
            if num_tokens > THIRD:
                seconds += third_s * (num_tokens - THIRD)
                if num_tokens > FOURTH:
                    seconds += fourth_s * (num_tokens - FOURTH)
        return seconds


PRIOR = StepModel(
    step_s=0.02,
    request_s=1e-4,
    context_s=1e-6,
    rank_s=2e-6,
    is_padded=False,
    prompt_step_s=0.02,
    token_s=(5e-5, 0.0, 1e-4, 0.0),
    prompt_context_s=1e-6,
    token_rank_s=1e-7,
    is_prompt_padded=False,
)
"""A model of seven billion weights on a data-centre GPU: the guess before an engine has reported its fits."""
