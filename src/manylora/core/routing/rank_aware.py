"""Routing by rank: a request goes to the replica where it slows the others down least.

Under padded kernels one adapter of rank 64 makes every row of a batch cost 64; under unpadded ones each row costs its
own rank, and the sum counts. A router that knows the cost of a step separates small ranks from large ones, or spreads
them, accordingly. Each engine fits that cost to its own steps (``core/costs/rank_fit.py``).

Source: CaraServe, "Rank-aware request scheduling", algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from manylora.core.routing.router import SloOptions
from manylora.core.routing.view import ReplicaView, StepTimes
from manylora.core.types import Request

__all__ = ["RankAwareRouter", "added_time"]

PENALTY_S = 1.0  # added where the SLO would be missed: longer than any step, so that such a replica is the last resort


def added_time(
    view: ReplicaView, num_tokens: int, rank: int, answer_tokens: float, num_cached: int = 0
) -> tuple[float, float]:
    """Return the time that a request would add at a replica to the next step and to each decode step, in seconds.

    The next step runs the prompts that wait, beside the requests that decode; without any it is a decode step. Of the
    prompt, ``num_cached`` tokens need not run.
    """
    prefill_s = _added_prefill_s(view, view.times(), num_tokens, rank, num_cached)
    return prefill_s, _added_decode_s(view, num_tokens, rank, answer_tokens)


def _added_prefill_s(view: ReplicaView, times: StepTimes, num_tokens: int, rank: int, num_cached: int = 0) -> float:
    _, next_s, _, context, num_rows, num_adapted, row_rank = times
    max_rank, num_run = view.max_rank, num_tokens - num_cached
    added_s = view.steps.prefill_s(
        num_rows + num_run,
        context + num_tokens,
        num_adapted + num_run if rank else num_adapted,
        row_rank + num_run * rank,
        rank if rank > max_rank else max_rank,
    )
    added_s -= next_s
    return added_s if added_s > 0.0 else 0.0


def _added_decode_s(view: ReplicaView, num_tokens: int, rank: int, answer_tokens: float) -> float:
    steps, added_rank = view.steps, rank
    if rank and steps.is_padded:
        adapted, max_rank = view.num_adapted, view.max_rank
        added_rank = (adapted + 1) * (rank if rank > max_rank else max_rank) - adapted * max_rank
    return steps.request_s + steps.context_s * (num_tokens + answer_tokens / 2) + steps.rank_s * added_rank


class RankAwareRouter:
    """The replica where the time added to all requests in flight is least.

    That is the time a request adds to each token of the others: its prompt, spread over an answer, and its part in
    every decode step, with a penalty where decoding would be slower than the SLO, ``tbt_s``; times the requests there.
    At an idle replica it is 0.
    """

    Options = SloOptions

    def __init__(self, ranks: Mapping[str, int], *, tbt_s: float | None = None) -> None:
        self._ranks = ranks
        self._tbt_s = tbt_s

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Compare the added time at every replica; of equals the first.

        A replica whose decode steps already cost more needs no account of its prompts.
        """
        rank = self._ranks.get(request.model, 0)
        num_tokens = len(request.prompt)
        best, least_s = among[0], math.inf
        for index in among:
            view = replicas[index]
            load, times = view.load, view.times()
            mean_answer = view.mean_answer_tokens
            cost_s = _added_decode_s(view, num_tokens, rank, mean_answer)
            if self._tbt_s is not None and times.decode_s + cost_s > self._tbt_s:
                cost_s += PENALTY_S
            if cost_s * load < least_s:
                total_s = (_added_prefill_s(view, times, num_tokens, rank) / mean_answer + cost_s) * load
                if total_s < least_s:
                    best, least_s = index, total_s
        return best
