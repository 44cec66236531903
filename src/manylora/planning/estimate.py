"""A first guess at capacity, in closed form: where a search begins, and the floor it is held against.

A device that always has enough to do reads a prompt in one step and decodes with as many sequences as fit. No queue, no
burst and no cold adapter is in it, so a service with an SLO reaches less. Where adapters do not all fit, the
other extreme is a copy for every request.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.costs.synthetic_plan import Part, synthetic_plan
from manylora.plan import AdapterLoad
from manylora.sim.run.adapters import adapter_versions
from manylora.sim.run.simulation import SimulationConfig
from manylora.types import Tier
from manylora.workloads import RequestSpec, Workload

__all__ = ["first_guess", "most_requests_per_s"]

START = 0.6
"""Of the rate of a device that is never idle: where a search begins."""


def first_guess(workload: Workload, config: SimulationConfig) -> float:
    """Return a rate to begin a search at, in requests per second.

    Args:
        workload: Its lengths and adapters count, its times do not.
        config: What serves it.

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
    """Return about how many requests per second a replica can serve that is never idle.

    Args:
        requests: Their lengths count, their times do not.
        config: What serves them.
    """
    prompt = max(1, round(sum(one.num_prompt_tokens for one in requests) / len(requests)))
    output = max(1, round(sum(one.num_output_tokens for one in requests) / len(requests)))
    context = prompt + output // 2
    fits = config.num_pages * config.base.page.block_size // (prompt + output)
    num_seqs = max(1, min(config.scheduler.max_num_seqs, fits))
    budget = config.scheduler.max_num_batched_tokens
    num_chunks = -(-prompt // budget)
    chunk = -(-prompt // num_chunks)
    prompt_s = num_chunks * config.cost.step_time_s(synthetic_plan([Part(0, chunk)]))
    decode_s = config.cost.step_time_s(synthetic_plan([Part(context, 1)] * num_seqs)) / num_seqs
    return 1 / (prompt_s + (output - 1) * decode_s)
