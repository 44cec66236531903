"""The default router: the least added time, with a price on every copy of an adapter.

::

    candidates   replicas that hold the adapter | the first few in its own order | the least loaded
                 of the base: the least loaded | the few that hold most of the prompt's beginning
    cost         prefill of the tokens that no prefix cache holds, for the request and for all others there
                 + decode steps of the answer, and the time that the request adds to those of the others
                 + added time by which tokens are expected to miss the SLO, ten times over
                 + wait for a seat or for memory: requests that must end first, times the time between two ends
                 + price of a copy: whole where the adapter is not, less at copies beyond those that its load needs

An adapter that no replica holds goes to the cheapest candidate: placing it is a chance to even out the load. From then
on its requests go there as long as that costs less than another copy. A hot adapter gets copies one by one. Once its
load falls, the last copies in its order are asked no more, and their engines drop them. There is no state beside the
views of the replicas: another router, or this one after a restart, decides alike (docs/routing.md).

All terms are seconds, predicted by the step-time model of each replica (``core/costs/step_model.py``). With load ``n``,
answers of ``a`` tokens, a prompt of ``p`` tokens of which ``c`` are cached, and decode steps of ``d``::

    (n + 1) * prefill(p - c)  +  a * (d + added)  +  n * a/2 * added  +  over * a * d / (n + 1)

A prefix saves its prefill to all requests at a replica, and a full replica costs each request more than an idle one: a
hot prefix spills over to another replica as soon as the load that it brings costs more than computing it once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.core.options import option
from manylora.core.routing.rank_aware import added_time
from manylora.core.routing.router import Rendezvous, SloOptions
from manylora.core.routing.view import ReplicaView
from manylora.core.types import Request

__all__ = ["AutoRouter"]

CHOICES = 4  # replicas in an adapter's order that are compared beside those that hold it

COPY_PRICE, COPY_PRICE_WITHOUT_SLO = 3.0, 0.5
"""Price of a copy, in the time that one more sequence adds to the steps of all answers at a replica.

Without an SLO nothing but this price bounds the imbalance: a third of a replica's requests. With one, the SLO does.
"""

IDLE_LOAD = 4
"""Requests that are added to a replica's when a copy there is priced, so that idle replicas do not attract copies."""

OUTER_SHARE = 0.1  # share of that price at a copy beyond those that the adapter's load needs
SLO_WEIGHT = 10.0  # cost of a second by which a token misses the SLO, in seconds

SLO_SPREAD = 0.04
"""Spread of the mean time of an answer's tokens around its prediction, relative to the SLO.

The requests that arrive and end during an answer are unknown: replicas predicted at the SLO end on either side of it.
"""

MOST_EXCESS = 30.0  # spreads beyond the SLO from which on the excess itself is the expectation, to the last digit


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions(SloOptions):
    """Options of ``AutoRouter``."""

    prefixes: bool = option(
        True, help="Count the prompt tokens that a replica's prefix cache is likely to hold as computed."
    )


class AutoRouter:
    """The cheapest of a few replicas, by added time, SLO (``tbt_s``, if any), memory and copies.

    With ``prefixes``, tokens count that a replica's prefix cache is likely to hold.
    """

    Options = AutoOptions

    def __init__(
        self, ranks: Mapping[str, int], *, max_num_seqs: int, tbt_s: float | None = None, prefixes: bool = True
    ) -> None:
        self._ranks = ranks
        self._max_num_seqs = max_num_seqs
        self._tbt_s = tbt_s
        self._prefixes = prefixes
        self._price = COPY_PRICE_WITHOUT_SLO if tbt_s is None else COPY_PRICE
        self._rendezvous = Rendezvous()

    def choose(self, request: Request, replicas: Seq[ReplicaView], among: Seq[int]) -> int:
        """Compare the candidates; of equals the first in the adapter's order."""
        if len(among) == 1:
            return among[0]
        rank = self._ranks.get(request.model)
        if rank is None:
            by_load = sorted(among, key=[view.load for view in replicas].__getitem__)
            prices = dict.fromkeys(by_load[:CHOICES], 0.0)
            if self._prefixes and (warm := [index for index in by_load if replicas[index].cached_tokens]):
                warm.sort(key=lambda index: -replicas[index].cached_tokens)
                prices |= dict.fromkeys(warm[:CHOICES], 0.0)
        else:
            prices = self._copy_prices(request.model, replicas, among)
        num_tokens, most_tokens = len(request.prompt), request.sampling.max_tokens

        def cost_s(index: int) -> float:
            return self._cost_s(replicas[index], num_tokens, rank or 0, most_tokens, prices[index])

        return min(prices, key=cost_s)

    def _copy_prices(self, adapter: str, replicas: Seq[ReplicaView], among: Seq[int]) -> dict[int, float]:
        """Return the price of a copy at each candidate: first the holders, each group in the adapter's order."""
        order: Seq[int] = self._rendezvous.order(adapter, len(replicas))
        if len(among) < len(replicas):
            serving = set(among)
            order = [index for index in order if index in serving]
        loads = [view.num_requests + view.num_foreign for view in map(replicas.__getitem__, among)]
        holders = [index for index in order if adapter in replicas[index].resident]
        asked = sum([replicas[index].adapters[adapter] for index in holders])
        needed = 1 + int(asked * len(among) / (sum(loads) + 1))
        prices = {index: 0.0 if place < needed else OUTER_SHARE * self._price for place, index in enumerate(holders)}
        elsewhere = self._price if holders else 0.0
        for index in order[:CHOICES]:
            prices.setdefault(index, elsewhere)
        prices.setdefault(among[loads.index(min(loads))], elsewhere)
        return prices

    def _cost_s(
        self, view: ReplicaView, num_tokens: int, rank: int, most_tokens: int | None, copy_price: float
    ) -> float:
        """Return the cost of a request at a replica, in seconds over all requests there."""
        load, mean_answer = view.load, view.mean_answer_tokens
        answer = mean_answer if most_tokens is None else min(mean_answer, most_tokens)
        num_cached = view.cached_tokens if self._prefixes else 0
        prefill_s, decode_s = added_time(view, num_tokens, rank, answer, num_cached)
        times = view.times()
        step_s = times.decode_s + decode_s
        # All wait for the prompt; the others have half of their answers before them.
        cost_s = (load + 1) * prefill_s + answer * step_s + load * mean_answer / 2 * decode_s
        if self._tbt_s is not None:
            before_s = times.decode_s + times.stall_s
            late_s = (load + 1) * _late_s(before_s + decode_s, self._tbt_s) - load * _late_s(before_s, self._tbt_s)
            cost_s += SLO_WEIGHT * answer * late_s
        num_over = self._num_over(view, num_tokens + answer)
        if num_over > 0:
            cost_s += num_over * answer * step_s / (load + 1)
        if copy_price:
            steps = view.steps
            sequence_s = steps.request_s + steps.context_s * (num_tokens + answer / 2) + steps.rank_s * rank
            cost_s += copy_price * (load + IDLE_LOAD) * answer * sequence_s
        return cost_s

    def _num_over(self, view: ReplicaView, num_tokens: float) -> float:
        """Return the number of requests that must end before one of that many tokens has a seat and memory.

        Where requests were queued, all that came since wait behind them. Where a share ``u`` of memory was held by
        ``n`` requests, it is enough for ``n / u``.
        """
        num_over = float(view.load + 1 - self._max_num_seqs)
        if view.num_queued:
            num_over = max(num_over, view.num_queued + 1 + view.load - view.load_then)
        if view.kv_usage and view.load_then:
            num_over = max(num_over, view.load + 1 - view.load_then / view.kv_usage)
        if view.kv_tokens is not None:
            held = view.num_prompt_tokens + view.num_requests * view.mean_answer_tokens
            num_over = max(num_over, (held + num_tokens - view.kv_tokens) / num_tokens)
        return num_over


def _late_s(predicted_s: float, slo_s: float) -> float:
    """Return the expected time by which a token is late: near 0 well within the SLO, the excess well beyond it."""
    spread_s = SLO_SPREAD * slo_s
    excess = (predicted_s - slo_s) / spread_s
    return spread_s * (excess if excess > MOST_EXCESS else math.log1p(math.exp(excess)))
