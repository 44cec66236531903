"""Distributions of lengths in tokens, each by the parameters it is published with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.workloads.streams import FloatArray

__all__ = [
    "Distribution",
    "ExponentialTokens",
    "FixedTokens",
    "GammaTokens",
    "LognormalTokens",
    "UniformTokens",
]


class Distribution(Protocol):
    """A distribution of numbers above 0."""

    kind: ClassVar[str]

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws, not rounded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTokens:
    """Always the same.

    Args:
        tokens: Number of tokens.
    """

    kind: ClassVar[str] = "fixed"
    tokens: int

    def __post_init__(self) -> None:
        require(self.tokens > 0, "tokens", self.tokens, "above 0")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return the length ``num`` times."""
        return np.full(num, float(self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTokens:
    """Every length in a range alike.

    Args:
        low: Least tokens.
        high: Tokens it stays below.
    """

    kind: ClassVar[str] = "uniform"
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low < self.high:
            raise ConfigError(f"Got low = {self.low!r}, high = {self.high!r}, expected 1 <= low < high")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.integers(self.low, self.high, num).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialTokens:
    """Exponential: answers that end at every token with the same chance.

    Args:
        mean: Mean tokens.
    """

    kind: ClassVar[str] = "exponential"
    mean: float

    def __post_init__(self) -> None:
        require(self.mean > 0, "mean", self.mean, "above 0")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.exponential(self.mean, num)


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaTokens:
    """Gamma, of mean ``shape * scale``.

    Args:
        shape: Below 1: most are short.
        scale: In tokens.
    """

    kind: ClassVar[str] = "gamma"
    shape: float
    scale: float

    def __post_init__(self) -> None:
        require(self.shape > 0, "shape", self.shape, "above 0")
        require(self.scale > 0, "scale", self.scale, "above 0")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.gamma(self.shape, self.scale, num)


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalTokens:
    """Lognormal, of median ``exp(mu)``.

    Args:
        mu: Mean of the logarithm.
        sigma: Standard deviation of the logarithm.
    """

    kind: ClassVar[str] = "lognormal"
    mu: float
    sigma: float

    def __post_init__(self) -> None:
        require(self.sigma >= 0, "sigma", self.sigma, "0 or above")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.lognormal(self.mu, self.sigma, num)
