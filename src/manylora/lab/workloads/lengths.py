"""Lengths of prompts and answers: rows of a trace, drawn or in order, or two published distributions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.workloads.traces.requests import read_requests
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = [
    "Distribution",
    "DrawnLengths",
    "ExponentialTokens",
    "FixedTokens",
    "GammaTokens",
    "Lengths",
    "LognormalTokens",
    "ParametricLengths",
    "ReplayLengths",
    "TokenBounds",
    "TraceLengths",
    "UniformTokens",
]


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Lengths of requests, in order of arrival.

    Args:
        prompt: Prompt tokens, at least 1.
        output: Answer tokens, at least 1.
        prefix: Names of the blocks each prompt begins with, where a trace tells; shared names are shared tokens.
        prefix_block_tokens: Tokens in each of those blocks.
    """

    prompt: IntArray
    output: IntArray
    prefix: tuple[tuple[int, ...], ...] | None = None
    prefix_block_tokens: int = 512


class Lengths(Protocol):
    """Draws the lengths of requests."""

    kind: ClassVar[str]

    def draw(self, num: int, rng: np.random.Generator) -> DrawnLengths:
        """Return the lengths of ``num`` requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBounds:
    """Limits that lengths are clamped to after scaling.

    Args:
        min_prompt: Least prompt tokens.
        max_prompt: Most prompt tokens.
        min_output: Least answer tokens.
        max_output: Most answer tokens.
    """

    min_prompt: int = 1
    max_prompt: int | None = None
    min_output: int = 1
    max_output: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("prompt", self.min_prompt, self.max_prompt),
            ("output", self.min_output, self.max_output),
        ):
            if low < 1 or (high is not None and high < low):
                raise ConfigError(f"Got min_{name} = {low!r}, max_{name} = {high!r}, expected 1 <= min <= max")

    def fit(
        self, prompt: FloatArray | IntArray, output: FloatArray | IntArray, scale: float
    ) -> tuple[IntArray, IntArray]:
        """Scale, and round to whole tokens within the limits."""
        return (
            np.clip(np.rint(prompt * scale), self.min_prompt, self.max_prompt).astype(np.int64),
            np.clip(np.rint(output * scale), self.min_output, self.max_output).astype(np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLengths:
    """Rows of a trace, drawn with replacement: the measured distribution, whatever its shape.

    Args:
        file: A trace with prompt and answer lengths.
        scale: Factor on both lengths.
        pairing: ``rows`` keeps a prompt with its answer; ``independent`` draws each by itself.
        bounds: Limits, after scaling.
    """

    kind: ClassVar[str] = "trace"
    file: Path
    scale: float = 1.0
    pairing: Literal["rows", "independent"] = "rows"
    bounds: TokenBounds = TokenBounds()

    def __post_init__(self) -> None:
        require(self.scale > 0, "scale", self.scale, "a factor above 0")

    def draw(self, num: int, rng: np.random.Generator) -> DrawnLengths:
        """Return the lengths of ``num`` rows, each drawn at random from the trace."""
        trace = read_requests(self.file)
        rows = rng.integers(0, len(trace.prompt), num)
        answers = rows if self.pairing == "rows" else rng.integers(0, len(trace.output), num)
        return DrawnLengths(*self.bounds.fit(trace.prompt[rows], trace.output[answers], self.scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLengths:
    """Rows of a trace in their order, with its prefixes; past its end it begins again.

    With arrivals replayed from the same file, each request is the recorded one.

    Args:
        file: A trace with prompt and answer lengths.
        scale: Factor on both lengths, and on the blocks of prefixes.
        bounds: Limits, after scaling.
    """

    kind: ClassVar[str] = "replay"
    file: Path
    scale: float = 1.0
    bounds: TokenBounds = TokenBounds()

    def __post_init__(self) -> None:
        require(self.scale > 0, "scale", self.scale, "a factor above 0")

    def draw(self, num: int, rng: np.random.Generator) -> DrawnLengths:
        """Return the lengths of the first ``num`` rows; after the last row the trace begins again."""
        trace = read_requests(self.file)
        rows = np.arange(num) % len(trace.prompt)
        prompt, output = self.bounds.fit(trace.prompt[rows], trace.output[rows], self.scale)
        if trace.prefix is None:
            return DrawnLengths(prompt, output)
        block = max(1, round(trace.prefix_block_tokens * self.scale))
        prefix = tuple(
            trace.prefix[row][: -(-tokens // block)] for row, tokens in zip(rows.tolist(), prompt.tolist(), strict=True)
        )
        return DrawnLengths(prompt, output, prefix, block)


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
        scale: Scale in tokens.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametricLengths:
    """Prompts and answers from two distributions.

    Args:
        prompt: Distribution of prompt tokens.
        output: Distribution of answer tokens.
        correlation: Rank correlation of the two: of the normal scores that order them (Iman and Conover), which leaves
            both distributions as they are. Measured on public traces: about 0; 0.8 for translation.
        scale: Factor on both lengths.
        bounds: Limits, after scaling.
    """

    kind: ClassVar[str] = "parametric"
    prompt: Distribution
    output: Distribution
    correlation: float = 0.0
    scale: float = 1.0
    bounds: TokenBounds = TokenBounds()

    def __post_init__(self) -> None:
        require(self.scale > 0, "scale", self.scale, "a factor above 0")
        require(-1 <= self.correlation <= 1, "correlation", self.correlation, "a number in [-1, 1]")

    def draw(self, num: int, rng: np.random.Generator) -> DrawnLengths:
        """Return ``num`` pairs of a prompt's and an answer's length."""
        # A stream each, so that another distribution of answers leaves the prompts as they are.
        of_prompt, of_output, of_pairs = rng.spawn(3)
        prompt, output = self.prompt.draw(num, of_prompt), self.output.draw(num, of_output)
        if self.correlation:
            first, second = of_pairs.standard_normal((2, num))
            second = self.correlation * first + np.sqrt(1 - self.correlation**2) * second
            prompt = np.sort(prompt)[_ranks(first)]
            output = np.sort(output)[_ranks(second)]
        return DrawnLengths(*self.bounds.fit(prompt, output, self.scale))


def _ranks(values: FloatArray) -> IntArray:
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks
