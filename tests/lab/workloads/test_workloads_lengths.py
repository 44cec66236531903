"""Lengths: what is drawn, what is clamped, and what follows a trace."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from manylora.core.errors import ConfigError
from manylora.lab.workloads.lengths import (
    Distribution,
    ExponentialTokens,
    FixedTokens,
    GammaTokens,
    LognormalTokens,
    ParametricLengths,
    ReplayLengths,
    TokenBounds,
    TraceLengths,
    UniformTokens,
)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.csv"
    rows = "".join(f"{100 * index},{index},0,0\n" for index in range(1, 11))
    file.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + rows)
    return file


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}\n'
    )
    return file


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        (FixedTokens(tokens=7), 7.0),
        (UniformTokens(low=8, high=512), 259.5),
        (ExponentialTokens(mean=40.0), 40.0),
        (GammaTokens(shape=1.338, scale=863.0), 1.338 * 863),
        (LognormalTokens(mu=2.788, sigma=0.847), math.exp(2.788 + 0.847**2 / 2)),
    ],
    ids=str,
)
def test_means_are_as_published(distribution: Distribution, mean: float) -> None:
    draws = distribution.draw(50_000, np.random.default_rng(0))
    assert float(np.mean(draws)) == pytest.approx(mean, rel=0.02)


def test_rows_stay_together_unless_told_otherwise(pairs: Path) -> None:
    together = TraceLengths(file=pairs, scale=0.5).draw(500, np.random.default_rng(0))
    assert np.array_equal(together.prompt, np.rint(50 * np.rint(together.prompt / 50)))
    assert set(zip(together.prompt.tolist(), together.output.tolist(), strict=True)) == {
        (50 * index, max(1, round(index / 2))) for index in range(1, 11)
    }
    apart = TraceLengths(file=pairs, pairing="independent").draw(5000, np.random.default_rng(0))
    assert abs(float(np.corrcoef(apart.prompt, apart.output)[0, 1])) < 0.05


def test_bounds_hold_after_scaling(pairs: Path) -> None:
    bounds = TokenBounds(max_prompt=30, min_output=3, max_output=4)
    drawn = TraceLengths(file=pairs, scale=0.001, bounds=bounds).draw(50, np.random.default_rng(0))
    assert drawn.prompt.min() == 1 and set(drawn.output.tolist()) == {3}
    with pytest.raises(ConfigError, match="min_output = 3, max_output = 2"):
        TokenBounds(min_output=3, max_output=2)


def test_correlation_reorders_and_changes_no_distribution() -> None:
    prompt, output = GammaTokens(shape=2.0, scale=100.0), LognormalTokens(mu=4.0, sigma=1.0)
    drawn = {
        correlation: ParametricLengths(prompt=prompt, output=output, correlation=correlation).draw(
            4000, np.random.default_rng(5)
        )
        for correlation in (0.0, 0.8, -0.8)
    }
    for one in drawn.values():
        assert sorted(one.prompt.tolist()) == sorted(drawn[0.0].prompt.tolist())
        assert sorted(one.output.tolist()) == sorted(drawn[0.0].output.tolist())

    def by_rank(correlation: float) -> float:
        pair = drawn[correlation]
        ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (pair.prompt, pair.output)]
        return float(np.corrcoef(*ranks)[0, 1])

    assert abs(by_rank(0.0)) < 0.05
    assert by_rank(0.8) == pytest.approx(0.79, abs=0.03)
    assert by_rank(-0.8) == pytest.approx(-0.79, abs=0.03)


def test_another_answer_leaves_the_prompts() -> None:
    prompt = GammaTokens(shape=2.0, scale=100.0)
    first = ParametricLengths(prompt=prompt, output=FixedTokens(tokens=5)).draw(50, np.random.default_rng(5))
    second = ParametricLengths(prompt=prompt, output=ExponentialTokens(mean=5.0)).draw(50, np.random.default_rng(5))
    assert np.array_equal(first.prompt, second.prompt)


def test_replay_takes_rows_in_order_with_their_prefixes(mooncake: Path) -> None:
    drawn = ReplayLengths(file=mooncake).draw(3, np.random.default_rng(0))
    assert drawn.prompt.tolist() == [1100, 600, 1100]
    assert drawn.prefix == ((0, 1, 2), (0, 9), (0, 1, 2)) and drawn.prefix_block_tokens == 512


def test_replay_takes_the_tenants_of_a_trace_that_names_them(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    head, row = "TIMESTAMP,ContextTokens,GeneratedTokens,tenant\n", "2023-11-16 18:17:0{},10,5,{}\n"
    file.write_text(head + row.format(4, "beta") + row.format(3, "acme"))
    assert ReplayLengths(file=file).draw(3, np.random.default_rng(0)).tenants == ("acme", "beta", "acme")
    file = tmp_path / "long.csv"
    file.write_text(head + row.format(4, "t" * 129))
    with pytest.raises(ConfigError, match=r"line 2, column 'tenant': .* a text of at most 128 characters"):
        ReplayLengths(file=file).draw(3, np.random.default_rng(0))


def test_scaling_scales_the_blocks_of_a_prefix(mooncake: Path) -> None:
    drawn = ReplayLengths(file=mooncake, scale=0.1, bounds=TokenBounds(max_prompt=60)).draw(2, np.random.default_rng(0))
    assert drawn.prompt.tolist() == [60, 60] and drawn.prefix_block_tokens == 51
    assert drawn.prefix == ((0, 1), (0, 9))  # no more blocks than the prompt reaches into


@pytest.mark.parametrize("mu", [20.0, 50.0, 2000.0])  # above all contexts, beyond 64 bits, infinite
def test_lengths_beyond_any_context_are_named(mu: float) -> None:
    long, short = LognormalTokens(mu=mu, sigma=0.1), FixedTokens(tokens=3)
    for lengths, name in (
        (ParametricLengths(prompt=long, output=short), "prompt"),
        (ParametricLengths(prompt=short, output=long), "output"),
    ):
        with pytest.raises(
            ConfigError, match=rf"tokens \({name}\), expected at most 16,777,216: set bounds.max_{name}"
        ):
            lengths.draw(4, np.random.default_rng(0))
        within = replace(lengths, bounds=TokenBounds(max_prompt=9, max_output=9)).draw(4, np.random.default_rng(0))
        assert getattr(within, name).tolist() == [9] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GammaTokens(shape=0.0, scale=1.0), "Got shape = 0.0"),
        (lambda: UniformTokens(low=8, high=8), "low = 8, high = 8"),
        (lambda: LognormalTokens(mu=1.0, sigma=-1.0), "Got sigma = -1.0"),
        (lambda: TraceLengths(file=Path("x"), scale=0.0), "Got scale = 0.0"),
        (
            lambda: ParametricLengths(prompt=FixedTokens(tokens=1), output=FixedTokens(tokens=1), correlation=2.0),
            "Got correlation = 2.0",
        ),
    ],
)
def test_wrong_values_are_named(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
