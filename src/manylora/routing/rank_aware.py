"""Routing by rank: a request goes to the replica where it slows the others down least.

Under padded kernels one adapter of rank 64 makes every row of a batch cost 64; under unpadded ones each row costs its
own rank, and the sum counts. A router that knows the kernels and the cost of a step separates small ranks from large
ones, or spreads them, accordingly.

Source: CaraServe, "Rank-aware request scheduling", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.errors import ConfigError
from manylora.options import check_options, option
from manylora.routing.router import ReplicaLoad
from manylora.types import Request

__all__ = ["RankAwareRouter", "StepModel"]

PENALTY_S = 1.0
"""Added where the SLO would be missed: longer than any step, so that such a replica is the last resort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A linear model of the duration of a step, in seconds: coarse, and enough to compare replicas.

    Args:
        step_s: Fixed cost of a decode step.
        request_s: Cost of each request that decodes.
        rank_s: Cost of each unit of rank: of the largest times the requests if ``is_padded``, else of the sum.
        prompt_token_s: Cost of each token of a prompt.
        prompt_token_rank_s: Cost of each token of a prompt and unit of its rank.
        is_padded: Whether every row costs the largest rank in the batch.
    """

    step_s: float
    request_s: float
    rank_s: float
    prompt_token_s: float
    prompt_token_rank_s: float
    is_padded: bool

    def decode_s(self, num_requests: int, sum_rank: int, max_rank: int) -> float:
        """Return the duration of a decode step, in seconds."""
        rank = num_requests * max_rank if self.is_padded else sum_rank
        return self.step_s + self.request_s * num_requests + self.rank_s * rank

    def prompt_s(self, num_tokens: int, rank: int) -> float:
        """Return the time that a prompt adds to its steps, in seconds."""
        return num_tokens * (self.prompt_token_s + self.prompt_token_rank_s * rank)


class RankAwareRouter:
    """The replica where the time added to all requests in flight is least.

    That is the time a request adds to each token of the others: its prompt, spread over an answer, and its part in
    every decode step, with a penalty where decoding would be slower than the SLO. At an idle replica it is 0.

    We differ from the source in one thing: a prompt is priced by itself, not with those that wait beside it, because
    this router cannot know which prompts have begun.

    Args:
        steps: The cost of steps.
        ranks: Rank of each adapter by name.
        mean_answer_tokens: Mean length of an answer.
        tbt_s: SLO of the time between tokens, in seconds; ``None`` for none.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """The SLO."""

        tbt_s: float | None = option(None, unit="s", above=0, help="Under rank-aware: SLO of the time between tokens.")

        def __post_init__(self) -> None:
            check_options(self)

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
        """Compare the added time at every replica."""
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
