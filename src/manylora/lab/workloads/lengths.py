"""Lengths of prompts and answers: rows of a trace, drawn or in order, or two published distributions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.lab.workloads.traces.requests import RequestLengths, read_requests
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = [
    "DISTRIBUTIONS",
    "LENGTHS",
    "Distribution",
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


MOST_TOKENS = 1 << 24  # of a prompt or an answer: beyond any context, and a prompt is made token by token


class Lengths(Protocol):
    """Draws the lengths of requests."""

    kind: ClassVar[str]

    def draw(self, num: int, rng: np.random.Generator) -> RequestLengths:
        """Return the lengths of ``num`` requests, in tokens, at least 1 each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBounds:
    """Limits that lengths of prompts and answers are clamped to after scaling, in tokens."""

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
        """Scale, and round to whole tokens within the limits; ``ConfigError`` for more than ``MOST_TOKENS``."""
        fitted = {
            "prompt": np.clip(np.rint(prompt * scale), self.min_prompt, self.max_prompt),
            "output": np.clip(np.rint(output * scale), self.min_output, self.max_output),
        }
        for name, tokens in fitted.items():
            if (longest := tokens.max(initial=0)) > MOST_TOKENS:
                raise ConfigError(
                    f"Got {longest:.3g} tokens ({name}), expected at most {MOST_TOKENS:,}: set bounds.max_{name}"
                )
        return fitted["prompt"].astype(np.int64), fitted["output"].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLengths(CheckedOptions):
    """Rows of a trace, drawn with replacement: the measured distribution, whatever its shape.

    The pairing ``rows`` keeps a prompt with its answer; ``independent`` draws each by itself.
    """

    kind: ClassVar[str] = "trace"
    file: Path = option(help="A trace with prompt and answer lengths.")
    scale: float = option(1.0, above=0, help="Factor on both lengths.")
    pairing: Literal["rows", "independent"] = "rows"
    bounds: TokenBounds = TokenBounds()

    def draw(self, num: int, rng: np.random.Generator) -> RequestLengths:
        """Return the lengths of ``num`` rows, each drawn at random from the trace."""
        trace = read_requests(self.file)
        rows = rng.integers(0, len(trace.prompt), num)
        answers = rows if self.pairing == "rows" else rng.integers(0, len(trace.output), num)
        return RequestLengths(*self.bounds.fit(trace.prompt[rows], trace.output[answers], self.scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLengths(CheckedOptions):
    """Rows of a trace in their order, with its prefixes and tenants; past its end it begins again.

    With arrivals replayed from the same file, each request is the recorded one.
    """

    kind: ClassVar[str] = "replay"
    file: Path = option(help="A trace with prompt and answer lengths.")
    scale: float = option(1.0, above=0, help="Factor on both lengths, and on the blocks of prefixes.")
    bounds: TokenBounds = TokenBounds()

    def draw(self, num: int, rng: np.random.Generator) -> RequestLengths:
        """Return the lengths of the first ``num`` rows; after the last row the trace begins again."""
        trace = read_requests(self.file)
        rows = np.arange(num) % len(trace.prompt)
        prompt, output = self.bounds.fit(trace.prompt[rows], trace.output[rows], self.scale)
        tenants = None if trace.tenants is None else tuple([trace.tenants[row] for row in rows.tolist()])
        if trace.prefix is None:
            return RequestLengths(prompt, output, tenants=tenants)
        block = max(1, round(trace.prefix_block_tokens * self.scale))
        prefix = tuple(
            trace.prefix[row][: -(-tokens // block)] for row, tokens in zip(rows.tolist(), prompt.tolist(), strict=True)
        )
        return RequestLengths(prompt, output, prefix, block, tenants)


class Distribution(Protocol):
    """A distribution of numbers above 0."""

    kind: ClassVar[str]

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws, not rounded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTokens(CheckedOptions):
    """Always the same."""

    kind: ClassVar[str] = "fixed"
    tokens: int = option(above=0, help="Number of tokens.")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return the length ``num`` times."""
        return np.full(num, float(self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTokens:
    """Every length from ``low`` tokens to below ``high`` alike."""

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
class ExponentialTokens(CheckedOptions):
    """Exponential: answers that end at every token with the same chance."""

    kind: ClassVar[str] = "exponential"
    mean: float = option(above=0, unit="tokens", help="Mean.")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.exponential(self.mean, num)


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaTokens(CheckedOptions):
    """Gamma, of mean ``shape * scale``."""

    kind: ClassVar[str] = "gamma"
    shape: float = option(above=0, help="Below 1, most are short.")
    scale: float = option(above=0, unit="tokens", help="Scale.")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.gamma(self.shape, self.scale, num)


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalTokens(CheckedOptions):
    """Lognormal, of median ``exp(mu)``: ``mu`` is the mean of the logarithm."""

    kind: ClassVar[str] = "lognormal"
    mu: float
    sigma: float = option(at_least=0, help="Standard deviation of the logarithm.")

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Return ``num`` independent draws."""
        return rng.lognormal(self.mu, self.sigma, num)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametricLengths(CheckedOptions):
    """Prompts and answers from two distributions.

    The correlation is that of the normal scores that order the two (Iman and Conover), which leaves both distributions
    as they are. Measured on public traces: about 0; 0.8 for translation.
    """

    kind: ClassVar[str] = "parametric"
    prompt: Distribution
    output: Distribution
    correlation: float = option(0.0, at_least=-1, at_most=1, help="Rank correlation of the two.")
    scale: float = option(1.0, above=0, help="Factor on both lengths.")
    bounds: TokenBounds = TokenBounds()

    def draw(self, num: int, rng: np.random.Generator) -> RequestLengths:
        """Return ``num`` pairs of a prompt's and an answer's length."""
        # A stream each, so that another distribution of answers leaves the prompts as they are.
        of_prompt, of_output, of_pairs = rng.spawn(3)
        prompt, output = self.prompt.draw(num, of_prompt), self.output.draw(num, of_output)
        if self.correlation:
            first, second = of_pairs.standard_normal((2, num))
            second = self.correlation * first + np.sqrt(1 - self.correlation**2) * second
            prompt = np.sort(prompt)[_ranks(first)]
            output = np.sort(output)[_ranks(second)]
        return RequestLengths(*self.bounds.fit(prompt, output, self.scale))


def _ranks(values: FloatArray) -> IntArray:
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


DISTRIBUTIONS = (ExponentialTokens, FixedTokens, GammaTokens, LognormalTokens, UniformTokens)
LENGTHS = (ParametricLengths, ReplayLengths, TraceLengths)
