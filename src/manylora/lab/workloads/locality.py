"""Popularity over time: requests for one adapter come in sessions, and the popular adapters change.

On a production trace a cache of 8 adapters serves 83 % of uses from memory, where independent draws of the same
popularity would give it 10 %. Two models of that, and the trace itself. Each decides the *order* of adapters; the times
come from the arrival process, so that load and locality are set apart from each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.lab.workloads.popularity import ShareLaw, ZipfShares, draw_places
from manylora.lab.workloads.traces.services import read_adapter_order, read_stack_distances
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = ["LOCALITIES", "Drift", "OrderReplay", "Sessions", "StackDistances"]

MEASURED_STARTS = ZipfShares(s=0.95, q=6.5)  # popularity fitted to the session starts of a production service


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions(CheckedOptions):
    """Users come, ask for one adapter some times, and leave.

    Lengths of sessions, and gaps between their requests relative to each other, are those measured on a production
    service; the gaps' scale follows from how many sessions overlap.
    """

    kind: ClassVar[str] = "sessions"
    num_at_once: float = option(20.0, above=0, help="Sessions that overlap, on average.")
    starts: ShareLaw = option(MEASURED_STARTS, help="Popularity of adapters among new sessions.")
    length_mu: float = option(0.97, help="Mean of the logarithm of the requests per session.")
    length_sigma: float = option(0.94, at_least=0, help="Standard deviation of that logarithm.")
    gap_sigma: float = option(1.01, at_least=0, help="Standard deviation of the logarithm of gaps.")

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request."""
        if not len(times):
            return np.empty(0, dtype=np.int64)
        of_holders, of_starts, of_lengths, of_gaps = rng.spawn(4)
        holders = of_holders.permutation(len(ranks))
        # Time in gaps: sessions start so often that num_at_once overlap, and run for a while before we look. The
        # logarithm's deviation skews gaps, so that one in a hundred sessions is many means long: twice ten is plenty.
        mean_length = math.exp(self.length_mu + self.length_sigma**2 / 2) + 0.5  # rounded up: half more
        rate = self.num_at_once / mean_length
        lead = 20.0 * mean_length
        span = lead + 1.2 * len(times) / self.num_at_once + 10 * mean_length
        while True:
            num = int(of_starts.poisson(rate * span))
            begins = np.sort(of_starts.uniform(0.0, span, num))
            whom = holders[draw_places(self.starts.shares(len(ranks)), num, of_starts)]
            lengths = np.maximum(1, np.ceil(of_lengths.lognormal(self.length_mu, self.length_sigma, num))).astype(int)
            gaps = of_gaps.lognormal(-(self.gap_sigma**2) / 2, self.gap_sigma, int(lengths.sum()))  # of mean 1
            first = np.cumsum(lengths) - lengths
            elapsed = np.cumsum(gaps)
            at = np.repeat(begins - elapsed[first], lengths) + elapsed
            seen = np.flatnonzero((at >= lead) & (at < span))
            if len(seen) >= len(times):
                break
            span *= 1.5
        in_order = seen[np.argsort(at[seen], kind="stable")][: len(times)]
        return np.repeat(whom, lengths)[in_order].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDistances:
    """Each request asks for the adapter that was used so many distinct adapters ago, as measured on a trace.

    Beyond the last measured distance comes an adapter not used yet; once all have been used, the one used longest ago.
    """

    kind: ClassVar[str] = "stack"
    file: Path = option(help="Hit rate of an LRU cache by its size: columns ``slots`` and ``column``.")
    column: str = option("lru_hit_all", help="Which of the measured hit rates.")

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request."""
        slots, hit_rate = read_stack_distances(self.file, self.column)
        of_holders, of_depths = rng.spawn(2)
        fresh = of_holders.permutation(len(ranks)).tolist()
        draws = of_depths.random(len(times))
        # Between two measured sizes, distances are taken to be equally likely.
        depths = np.interp(draws, np.concatenate([[0.0], hit_rate]), np.concatenate([[0.0], slots])).astype(int)
        new = draws >= hit_rate[-1]
        order: list[int] = []  # by last use, the latest last
        chosen = np.empty(len(times), dtype=np.int64)
        for index, (depth, is_new) in enumerate(zip(depths.tolist(), new.tolist(), strict=True)):
            if not is_new and depth < len(order):
                adapter = order.pop(-1 - depth)
            else:
                adapter = fresh.pop() if fresh else order.pop(0)
            order.append(adapter)
            chosen[index] = adapter
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReplay:
    """The adapters of a trace in its order; past its end it begins again.

    The trace's adapters are dealt out to ours in order of their first use: with fewer of ours, several share one.
    """

    kind: ClassVar[str] = "order"
    file: Path = option(help="GenTD26's `gentd26_data_trace_processed.csv.gz`.")

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request."""
        recorded = read_adapter_order(self.file)
        holders = rng.permutation(len(ranks))
        return holders[recorded[np.arange(len(times)) % len(recorded)] % len(ranks)].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift(CheckedOptions):
    """Every period, some of the most popular adapters change places with others of the same rank.

    So the popular adapters change, while their sizes do not. Of a production service's 20 most
    popular adapters 13 and 16 changed from one week to the next.
    """

    period_s: float = option(above=0, unit="s", help="Time between changes.")
    top: int = option(20, at_least=1, help="Adapters that count as popular.")
    share: float = option(0.7, at_least=0, at_most=1, help="Part of them that changes each time.")

    def apply(self, times: FloatArray, chosen: IntArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapters of requests with drift, given those that a law without time has ``chosen``.

        ``ConfigError`` if all adapters count as popular.
        """
        if self.top >= len(ranks):
            raise ConfigError(f"Got drift with top = {self.top}, expected fewer than the {len(ranks)} adapters")
        by_popularity = np.argsort(-np.bincount(chosen, minlength=len(ranks)), kind="stable").tolist()
        top = by_popularity[: self.top]
        rest: dict[int, list[int]] = {}
        for place in by_popularity[self.top :]:
            rest.setdefault(ranks[place], []).append(place)
        holder = np.arange(len(ranks))  # index: the adapter drawn without drift; value: the adapter now
        drifted = chosen.copy()
        periods = (times // self.period_s).astype(np.int64)
        for period in range(1, int(periods[-1]) + 1 if len(periods) else 0):
            for index in rng.permutation(len(top))[: round(self.share * len(top))].tolist():
                place = top[index]
                others = rest.get(ranks[place])
                if others:
                    other = others[int(rng.integers(len(others)))]
                    holder[[place, other]] = holder[[other, place]]
            now = periods == period
            drifted[now] = holder[chosen[now]]
        return drifted


LOCALITIES = (OrderReplay, Sessions, StackDistances)
