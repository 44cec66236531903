"""Capacity: the highest rate that meets the SLO, found by bracketing and bisection from a guess in closed form.

Rates are compared by their ratio: the search ends when the lowest rate that missed the SLO is within the tolerance of
the highest that met it. It returns the highest rate that met it.

The first guess takes a saturated device, which reads a prompt in one step and decodes with as many sequences as fit.
There is no queue, burst or cold adapter in this model, so a service with an SLO reaches less. Where adapters do not all
fit, every request is assumed to copy its adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manylora.core.errors import ConfigError
from manylora.core.plan import AdapterLoad
from manylora.core.types import Tier
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.planning.load_test import LoadTest
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.workloads import RequestSpec, Workload

__all__ = ["Capacity", "expected_load_tests", "find_capacity", "first_guess", "most_requests_per_s"]

WIDEN = 2.0
"""Factor between rates while there is no bracket."""

MOST_WIDENINGS = 8
"""Most times the first guess is halved (then no rate meets the SLO) or doubled (then there is no limit)."""

START = 0.6
"""The first guess, as a share of the rate of a device that is never idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a search.

    Args:
        rate: Requests per second; 0 if every rate missed the SLO.
        met: The load test at that rate; ``None`` if there is none.
        missed: The load test at the lowest rate that missed the SLO; ``None`` if none did.
        load_tests: All load tests, in the order of the search.
    """

    rate: float
    met: LoadTest | None
    missed: LoadTest | None
    load_tests: tuple[LoadTest, ...]


def expected_load_tests(tolerance: float) -> int:
    """Return about how many load tests a search takes: two that bracket the capacity, then halvings of the bracket."""
    return 2 + math.ceil(math.log2(math.log(WIDEN) / math.log1p(tolerance)))


def find_capacity(try_rate: Callable[[float], LoadTest], *, start: float, tolerance: float = 0.02) -> Capacity:
    """Search for the highest rate that meets the SLO.

    Args:
        try_rate: Runs a load test at a rate in requests per second; the SLO must be met at every lower rate as well.
        start: First guess.
        tolerance: Largest error of the result, as a share of the true capacity.

    Raises:
        ConfigError: The guess or the tolerance is out of range.
    """
    if not start > 0 or not 0 < tolerance < 1:
        raise ConfigError(f"Got {start = }, {tolerance = }, expected a rate above 0 and a share in (0, 1)")
    load_tests: list[LoadTest] = []

    def attempt(rate: float) -> LoadTest:
        load_tests.append(try_rate(rate))
        return load_tests[-1]

    met: LoadTest | None = None
    missed: LoadTest | None = None
    rate = start
    for _ in range(1 + MOST_WIDENINGS):
        load_test = attempt(rate)
        if load_test.is_met:
            met, rate = load_test, rate * WIDEN
        else:
            missed, rate = load_test, rate / WIDEN
        if met is not None and missed is not None:
            break
    if met is None or missed is None:
        return Capacity(rate=met.rate if met is not None else 0.0, met=met, missed=missed, load_tests=tuple(load_tests))
    while missed.rate > met.rate * (1 + tolerance):
        middle = attempt((met.rate * missed.rate) ** 0.5)
        if middle.is_met:
            met = middle
        else:
            missed = middle
    return Capacity(rate=met.rate, met=met, missed=missed, load_tests=tuple(load_tests))


def first_guess(workload: Workload, config: SimulationConfig) -> float:
    """Return the rate at which a search begins, in requests per second; the workload's times are ignored.

    Raises:
        AdapterError: An adapter applies to no module of the base.
    """
    most = most_requests_per_s(workload.requests, config)
    versions = adapter_versions(workload.adapters, config.base)
    if sum(one.num_pages for one in versions.values()) <= config.num_pages // 2:
        return START * most
    asked = [versions[one.adapter] for one in workload.requests[:500] if one.adapter is not None]
    copies_s = sum(config.cost.load_time_s(AdapterLoad(version=one, tier=Tier.DEVICE)) for one in asked)
    return START * min(most, len(asked) / copies_s if copies_s else most)


def most_requests_per_s(requests: Sequence[RequestSpec], config: SimulationConfig) -> float:
    """Return the approximate requests per second of a replica that is never idle; the requests' times are ignored."""
    prompt = max(1, round(sum(one.num_prompt_tokens for one in requests) / len(requests)))
    output = max(1, round(sum(one.num_output_tokens for one in requests) / len(requests)))
    context = prompt + output // 2
    fits = config.num_pages * config.base.page.block_size // (prompt + output)
    num_seqs = max(1, min(config.scheduler.max_num_seqs, fits))
    budget = config.scheduler.max_num_batched_tokens
    num_chunks = -(-prompt // budget)
    chunk = -(-prompt // num_chunks)
    prompt_s = num_chunks * config.cost.step_time_s(synthetic_plan([SyntheticSequence(0, chunk)]))
    decode_s = config.cost.step_time_s(synthetic_plan([SyntheticSequence(context, 1)] * num_seqs)) / num_seqs
    return 1 / (prompt_s + (output - 1) * decode_s)
