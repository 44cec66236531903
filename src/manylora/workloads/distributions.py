"""Distributions of lengths in tokens, each by the parameters it is published with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from manylora.errors import ConfigError
from manylora.workloads.streams import FloatArray

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


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"Got {name} = {value!r}, expected above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTokens:
    """Always the same.

    Args:
        tokens: How many.
    """

    kind: ClassVar[str] = "fixed"
    tokens: int

    def __post_init__(self) -> None:
        _check_positive("tokens", self.tokens)

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
        _check_positive("mean", self.mean)

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
        _check_positive("shape", self.shape)
        _check_positive("scale", self.scale)

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
        if self.sigma < 0:
            raise ConfigError(f"Got sigma = {self.sigma!r}, expected 0 or above")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.lognormal(self.mu, self.sigma, num)
