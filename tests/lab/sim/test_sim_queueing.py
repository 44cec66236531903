"""The engine as a queue with one server, beside what queueing theory says in closed form.

The core and the loop are those that serve; the batch holds one sequence, a request is one step whose time is its size,
arrivals are Poisson. Then requests wait as in M/G/1, where the mean is known exactly (Pollaczek, Khinchine):
``rate * E[S^2] / (2 (1 - load))``, with ``S`` a request's service time. Each request's wait is held against Lindley's
recursion on the same arrivals and sizes, and the mean against the formula (over 900,000 requests for each law of sizes
in ``bench/results/closed_forms.md``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

import pytest

from manylora.core.adapters.shape import BaseShape, PageShape
from manylora.core.config import MemoryConfig, SchedulerConfig
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.workloads import RequestSpec, Workload

MEAN_TOKENS = 1000
"""Mean size of a request in tokens, each a millisecond: sizes are whole numbers, and this many make them smooth."""
TOKEN_S = 0.001
MAX_TOKENS = 40 * MEAN_TOKENS
NUM_BATCHES = 40


BASE = BaseShape(
    name="queue",
    architecture="llama",
    fingerprint="queue",
    vocab_size=16,
    hidden_size=8,
    num_layers=1,
    max_model_len=MAX_TOKENS + 1,
    page=PageShape(block_size=1024, num_layers=1, num_kv_heads=1, head_dim=8, element_bytes=2, dtype="bfloat16"),
    modules=(),
    all_linear=(),
    eos_token_ids=(),
)


class Law(NamedTuple):
    """How sizes are drawn, with mean 1: one size, and the mean of its square."""

    draw: Callable[[random.Random], float]
    second_moment: float


LAWS = {
    "exponential (M/M/1)": Law(lambda rng: rng.expovariate(1.0), 2.0),
    "constant (M/D/1)": Law(lambda rng: 1.0, 1.0),
    "nine in ten short, one ten times as long (M/G/1)": Law(
        lambda rng: (10.0 if rng.random() < 0.1 else 1.0) / 1.9, (0.9 + 0.1 * 100.0) / 1.9**2
    ),
}


class Job(NamedTuple):
    """A request: its arrival in seconds, and its tokens."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One law at one load; times in seconds.

    Args:
        largest_difference_s: Of any request's wait from Lindley's recursion.
        interval_s: Half the width of the 95 % interval of the mean.
    """

    law: str
    load: float
    requests: int
    expected_s: float
    mean_s: float
    interval_s: float
    largest_difference_s: float

    @property
    def error(self) -> float:
        return self.mean_s / self.expected_s - 1.0


def make_jobs(law: Law, load: float, count: int, seed: int) -> list[Job]:
    """Draw Poisson arrivals that keep one server busy for ``load`` of the time."""
    rng, at = random.Random(seed), 0.0
    jobs = []
    for _ in range(count):
        at += rng.expovariate(load / (MEAN_TOKENS * TOKEN_S))
        jobs.append(Job(at, min(MAX_TOKENS, max(1, round(law.draw(rng) * MEAN_TOKENS)))))
    return jobs


def waits_of_engine(jobs: list[Job]) -> list[float]:
    """Serve the jobs, one sequence at a time, and return how long each waited."""
    requests = (RequestSpec(arrival_s=one.at, num_prompt_tokens=one.tokens, num_output_tokens=1) for one in jobs)
    config = SimulationConfig(
        base=BASE,
        cost=FixedCost(step_s=0.0, token_s=TOKEN_S),
        num_pages=MAX_TOKENS // BASE.page.block_size + 2,
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=MAX_TOKENS, max_waiting=len(jobs)),
        memory=MemoryConfig(block_size=BASE.page.block_size, prefix_caching=False),
    )
    records = simulate(Workload(name="queue", requests=tuple(requests), adapters=()), config).records
    return [one.queueing_s or 0.0 for one in records]


def waits_of_lindley(jobs: list[Job]) -> list[float]:
    """Return each job's wait in a queue with one server, first come, first served."""
    waits, free_at = [], 0.0
    for job in jobs:
        waits.append(max(0.0, free_at - job.at))
        free_at = max(free_at, job.at) + job.tokens * TOKEN_S
    return waits


def expected_wait_s(law: Law, load: float) -> float:
    """Return the mean wait by the formula, in seconds."""
    return load * law.second_moment / (2.0 * (1.0 - load)) * MEAN_TOKENS * TOKEN_S


def compare(name: str, load: float, count: int, seed: int) -> Row:
    """Serve ``count`` requests and hold their waits against both."""
    jobs = make_jobs(LAWS[name], load, count, seed)
    waits = waits_of_engine(jobs)
    size = count // NUM_BATCHES
    means = [fmean(waits[start : start + size]) for start in range(0, size * NUM_BATCHES, size)]
    return Row(
        law=name,
        load=load,
        requests=count,
        expected_s=expected_wait_s(LAWS[name], load),
        mean_s=fmean(waits),
        interval_s=2.02 * stdev(means) / sqrt(NUM_BATCHES),
        largest_difference_s=max(abs(a - b) for a, b in zip(waits, waits_of_lindley(jobs), strict=True)),
    )


@pytest.mark.parametrize("law", sorted(LAWS))
def test_waits_are_those_of_a_queue_with_one_server(law):
    row = compare(law, load=0.5, count=4_000, seed=0)
    assert row.largest_difference_s < 1e-6
    assert abs(row.mean_s - row.expected_s) < 2.0 * row.interval_s, "beyond four standard errors"
    assert row.interval_s < 0.2 * row.expected_s, "the bound above means nothing"
