"""Popularity of adapters: laws that give every adapter a share of the requests, drawn independently.

Independent draws are the pessimistic case for a cache: real requests for one adapter come in sessions
(``locality.py``). Which adapter is popular has nothing to do with its rank, unless the law says so.

A *place* below is a rank in the sense of popularity (place 1 is asked for most); a *rank* is always a LoRA rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.lab.workloads.traces.services import read_adapter_uses
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = [
    "POPULARITIES",
    "SHARE_LAWS",
    "ExplicitShares",
    "GeometricShares",
    "MeasuredShares",
    "Popularity",
    "PowerShares",
    "RankShares",
    "ShareLaw",
    "TurnTaking",
    "UniformShares",
    "ZipfShares",
    "draw_places",
]


class Popularity(Protocol):
    """Assigns an adapter to each request."""

    kind: ClassVar[str]

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request, as an index into the LoRA ``ranks``, by the arrivals in seconds."""
        ...


class ShareLaw(Protocol):
    """A law of popularity over any number of adapters."""

    kind: ClassVar[str]

    def shares(self, num: int) -> FloatArray:
        """Return the shares of ``num`` places, which add up to 1, largest first."""
        ...


def draw_places(shares: FloatArray, num: int, rng: np.random.Generator) -> IntArray:
    """Draw ``num`` places independently with these shares."""
    cumulative = np.cumsum(shares)
    places: IntArray = np.searchsorted(cumulative[:-1], rng.random(num) * cumulative[-1], side="right")
    return places


class _DrawnPlaces(CheckedOptions, ABC):
    """Draws a place for each request by ``shares``; a stream of its own deals the places out to the adapters."""

    __slots__ = ()

    @abstractmethod
    def shares(self, num: int) -> FloatArray:
        """Return the shares of ``num`` places, largest first."""

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request."""
        of_places, of_holders = rng.spawn(2)
        holders = of_holders.permutation(len(ranks)).astype(np.int64)
        return holders[draw_places(self.shares(len(ranks)), len(times), of_places)]


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformShares(_DrawnPlaces):
    """Every adapter alike."""

    kind: ClassVar[str] = "uniform"

    def shares(self, num: int) -> FloatArray:
        """Return equal shares."""
        return np.full(num, 1 / num)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfShares(_DrawnPlaces):
    """Zipf-Mandelbrot's law, ``(place + q) ** -s``; Zipf's with ``q`` 0.

    The defaults fit a production service with 874 LoRA adapters; Zipf's own law fits it with s = 0.92.
    """

    kind: ClassVar[str] = "zipf"
    s: float = option(1.14, at_least=0, help="Exponent; 0 is uniform.")
    q: float = option(3.6, above=-1, help="Flattening of the top.")

    def shares(self, num: int) -> FloatArray:
        """Return the shares of so many places."""
        weights = (np.arange(1, num + 1) + self.q) ** -self.s
        return np.asarray(weights / weights.sum(), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerShares(_DrawnPlaces):
    """S-LoRA's law, ``(i/n) ** alpha - ((i-1)/n) ** alpha``: the distribution of ``floor(n * U ** (1/alpha))``.

    Its published default, an ``alpha`` of 1, is uniform. Real adapters fit 0.27, where the first tenth gets about
    half of the requests.
    """

    kind: ClassVar[str] = "power"
    alpha: float = option(above=0, at_most=1, help="The smaller, the steeper; 1 is uniform.")

    def shares(self, num: int) -> FloatArray:
        """Return the shares of so many places."""
        return np.diff((np.arange(num + 1) / num) ** self.alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricShares(_DrawnPlaces):
    """Each place gets ``ratio`` times the requests of the next; Punica's benchmark calls it "zipf:1.5"."""

    kind: ClassVar[str] = "geometric"
    ratio: float = option(1.5, above=1, help="Requests of a place over those of the next.")

    def shares(self, num: int) -> FloatArray:
        """Return the shares of so many places."""
        weights = float(self.ratio) ** -np.arange(num, dtype=np.float64)
        return np.asarray(weights / weights.sum(), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitShares:
    """Shares that are given, one per adapter, in the adapters' order."""

    kind: ClassVar[str] = "explicit"
    weights: tuple[float, ...] = option(help="Shares in any unit: their sum need not be 1.")

    def __post_init__(self) -> None:
        if not self.weights or min(self.weights) < 0 or not sum(self.weights) > 0:
            raise ConfigError(f"Got weights = {self.weights!r}, expected numbers from 0, not all of them 0")

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request."""
        if len(self.weights) != len(ranks):
            raise ConfigError(f"Got {len(self.weights)} weights for {len(ranks)} adapters, expected one for each")
        return draw_places(np.asarray(self.weights, dtype=np.float64), len(times), rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShares(_DrawnPlaces):
    """Measured uses of the adapters of a production service, each use drawn independently.

    With fewer adapters in the workload, the most popular of the service are kept.
    """

    kind: ClassVar[str] = "measured"
    file: Path = option(help="GenTD26's `gentd26_lora_popularity.csv`.")
    column: str = option("uses_all_68195_rows", help="Which of its counts.")

    def shares(self, num: int) -> FloatArray:
        """Return the counts of the ``num`` most popular adapters."""
        uses = np.sort(read_adapter_uses(self.file, self.column))[::-1]
        if len(uses) < num:
            raise ConfigError(f"{self.file}: counts of {len(uses)} adapters, expected at least {num}")
        return uses[:num].astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """First a LoRA rank, then an adapter of that rank: Chameleon's workloads (sections 5.1 and 5.4.2).

    Uniform over both is the paper's U-U; a power law over the adapters U-P, its default; over both P-P. It does not
    say which exponent.
    """

    kind: ClassVar[str] = "rank"
    ranks: ShareLaw = option(UniformShares(), help="Over the ranks, the smallest being the most popular.")
    adapters: ShareLaw = option(PowerShares(alpha=0.27), help="Over the adapters of a rank, the most popular first.")

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request."""
        distinct = sorted(set(ranks))
        shares = np.empty(len(ranks))
        for rank, share in zip(distinct, self.ranks.shares(len(distinct)).tolist(), strict=True):
            members = [index for index, other in enumerate(ranks) if other == rank]
            shares[members] = share * self.adapters.shares(len(members))
        return draw_places(shares, len(times), rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTaking:
    """Each adapter in turn: the worst case for a cache smaller than all of them."""

    kind: ClassVar[str] = "turns"

    def assign(self, times: FloatArray, ranks: Sequence[int], rng: np.random.Generator) -> IntArray:
        """Return the adapter of each request."""
        return np.arange(len(times), dtype=np.int64) % len(ranks)


SHARE_LAWS = (GeometricShares, PowerShares, UniformShares, ZipfShares)
POPULARITIES = (ExplicitShares, MeasuredShares, RankShares, TurnTaking, *SHARE_LAWS)
