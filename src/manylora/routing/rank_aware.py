"""Routing by rank: a request goes where it slows others down least.

Ranks are not equal. Under padded kernels one adapter of rank 64 makes every row of a batch pay for 64; under unpadded
ones rows pay for their own, and what counts is the sum. A router that knows which, and what a step takes, keeps small
ranks apart from large ones, or spreads them, as the case may be.

Source: CaraServe, "Rank-aware request scheduling", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.errors import ConfigError
from manylora.routing.router import ReplicaLoad
from manylora.types import Request

__all__ = ["RankAwareRouter", "StepModel"]

PENALTY_S = 1.0
"""Added where the promise would break: more than any step takes, so that such a replica is the last resort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """What a step takes, as a line: coarse, and enough to say which replica would feel a request more.

    Args:
        step_s: Fixed cost of a decode step, in seconds.
        request_s: For each request that decodes.
        rank_s: For each unit of rank: of the largest times the requests where ``is_padded``, else of the sum.
        prompt_token_s: For each token of a prompt.
        prompt_token_rank_s: For each token of a prompt and unit of its rank.
        is_padded: Whether every row pays for the largest rank in the batch.
    """

    step_s: float
    request_s: float
    rank_s: float
    prompt_token_s: float
    prompt_token_rank_s: float
    is_padded: bool

    def decode_s(self, num_requests: int, sum_rank: int, max_rank: int) -> float:
        """Return how long a decode step takes, in seconds."""
        rank = num_requests * max_rank if self.is_padded else sum_rank
        return self.step_s + self.request_s * num_requests + self.rank_s * rank

    def prompt_s(self, num_tokens: int, rank: int) -> float:
        """Return what a prompt adds to the steps that it is part of, in seconds."""
        return num_tokens * (self.prompt_token_s + self.prompt_token_rank_s * rank)


class RankAwareRouter:
    """The replica where the added time, for all that is under way there, is least.

    The time is what a request adds to each token of the others: its prompt, spread over an answer, and its part in
    every decode step; with a penalty where decoding would get slower than promised. Where nothing is under way it is
    nothing.

    We differ from the source in one thing: a prompt is priced by itself, not with those that wait beside it, for a
    router that sees what it sent and what came back cannot tell which prompts have begun.

    Args:
        steps: What steps take.
        ranks: Rank of each adapter by name.
        mean_answer_tokens: Usual length of an answer.
        tbt_s: Longest time between tokens that was promised, in seconds; ``None`` for no promise.
    """

    def __init__(
        self, steps: StepModel, ranks: Mapping[str, int], *, mean_answer_tokens: float, tbt_s: float | None = None
    ) -> None:
        if mean_answer_tokens <= 0:
            raise ConfigError(f"Got {mean_answer_tokens = }, expected a number above 0")
        self._steps = steps
        self._ranks = ranks
        self._mean_answer_tokens = mean_answer_tokens
        self._tbt_s = tbt_s

    def choose(self, request: Request, replicas: Seq[ReplicaLoad]) -> int:
        """Price the request everywhere."""
        rank = self._ranks.get(request.model, 0)
        prompt_s = self._steps.prompt_s(len(request.prompt), rank) / self._mean_answer_tokens

        def total_s(index: int) -> float:
            load = replicas[index]
            before_s = self._steps.decode_s(load.num_requests, load.sum_rank, load.max_rank)
            after_s = self._steps.decode_s(load.num_requests + 1, load.sum_rank + rank, max(load.max_rank, rank))
            cost_s = prompt_s + after_s - before_s
            if self._tbt_s is not None and after_s > self._tbt_s:
                cost_s += PENALTY_S
            return cost_s * load.num_requests

        return min(range(len(replicas)), key=total_s)
