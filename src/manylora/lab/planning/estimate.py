"""A first guess at capacity, in closed form: the start of the search, and an upper bound in the report.

A saturated device reads a prompt in one step and decodes with as many sequences as fit. There is no queue, burst or
cold adapter in this model, so a service with an SLO reaches less. Where adapters do not all fit, every request is
assumed to copy its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.core.plan import AdapterLoad
from manylora.core.types import Tier
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.workloads import RequestSpec, Workload

__all__ = ["first_guess", "most_requests_per_s"]

START = 0.6
"""The first guess, as a share of the rate of a device that is never idle."""


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
