"""Drift: the popular adapters change over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads.streams import FloatArray, IntArray

__all__ = ["Drift"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Every period, some of the most popular adapters change places with others of the same rank.

    So the popular adapters change, while their sizes do not. Of a production service's 20 most
    popular adapters 13 and 16 changed from one week to the next.

    Args:
        period_s: Seconds between changes.
        top: Adapters that count as popular.
        share: Part of them that changes each time.
    """

    period_s: float
    top: int = 20
    share: float = 0.7

    def __post_init__(self) -> None:
        if not (self.period_s > 0 and self.top >= 1 and 0 <= self.share <= 1):
            raise ConfigError(f"Got {self}, expected period_s > 0, top >= 1 and a share in [0, 1]")

    def apply(self, times: FloatArray, chosen: IntArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapters of requests with drift, given those without.

        Args:
            times: Arrivals in seconds, in order.
            chosen: Adapter of each, as a law without time has drawn it.
            ranks: LoRA rank of every adapter.
            rng: Source of randomness.

        Raises:
            ConfigError: All adapters count as popular.
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
