"""A day of a service with adapters, compressed, and a scaler that knows it beforehand.

For the evaluation of scaling (``bench/scaling.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manylora.core.scaling import FleetLoad, ScalingDecision
from manylora.lab.sim.run.scaling import ReplicaSpan
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload
from manylora.lab.workloads.streams import FloatArray
from manylora.lab.workloads.traces.gentd26 import read_service_metric

__all__ = ["Clairvoyant", "count_flaps", "make_day", "replica_seconds"]

RANKS = (8, 16, 32, 64)
NUM_ADAPTERS, ZIPF = 200, 0.92
"""As the adapters of the same service (GenTD26) are asked for."""

BIN_S = 300.0
"""Seconds of the trace over which its rate is taken: each container reports about once a minute."""

PROMPT_MEAN, PROMPT_SIGMA, MOST_PROMPT_TOKENS = 6.2, 0.7, 2000
"""Length of a prompt: mean and deviation of its logarithm, and a bound."""

ANSWER_TOKENS, MOST_ANSWER_TOKENS = 80, 400
"""Length of an answer: mean of an exponential distribution, and a bound."""


def make_day(trace: Path, *, compression: float, peak_rate: float, seed: int) -> Workload:
    """Return the requests of a day whose rate is that of the trace, scaled; arrivals are a Poisson process.

    Args:
        trace: Requests per second of each container of a service, as ``gentd26_qps.csv.gz``.
        compression: Seconds of the trace in one second.
        peak_rate: Requests per second in the busiest half hour of the trace.
        seed: Seeds the times, lengths and adapters.
    """
    metric = read_service_metric(trace)
    bins = ((metric.time_s - metric.time_s.min()) // BIN_S).astype(int)
    shape = np.bincount(bins, weights=metric.value)
    shape *= peak_rate / np.convolve(shape, np.full(6, 1 / 6), mode="valid").max()
    bin_s = BIN_S / compression
    rng = np.random.default_rng(seed)
    counts = rng.poisson(shape * bin_s)
    times: FloatArray = np.concatenate([(place + np.sort(rng.random(num))) * bin_s for place, num in enumerate(counts)])
    popularity = (1.0 + np.arange(NUM_ADAPTERS)) ** -ZIPF
    adapters = rng.choice(NUM_ADAPTERS, len(times), p=popularity / popularity.sum())
    prompts = np.clip(rng.lognormal(PROMPT_MEAN, PROMPT_SIGMA, len(times)), 8, MOST_PROMPT_TOKENS)
    answers = np.clip(rng.exponential(ANSWER_TOKENS, len(times)), 1, MOST_ANSWER_TOKENS)
    requests = tuple(
        RequestSpec(
            arrival_s=float(time),
            num_prompt_tokens=int(prompt),
            num_output_tokens=int(answer),
            adapter=f"adapter-{adapter}",
        )
        for time, prompt, answer, adapter in zip(times, prompts, answers, adapters, strict=True)
    )
    specs = tuple(AdapterSpec(name=f"adapter-{index}", rank=RANKS[index % len(RANKS)]) for index in range(NUM_ADAPTERS))
    return Workload(name=f"a day of {trace.name}", requests=requests, adapters=specs)


class Clairvoyant:
    """A scaler that knows all arrivals: the cheapest plan that has the replicas for each moment, starts paid for.

    The need of a moment is its arrivals over a few seconds, by the rate of a replica. Replica ``k`` is in use where the
    need is ``k`` or more, and through every gap that is shorter than a start; each is asked for a start ahead. Gaps of
    one replica do not depend on the others, so this is the least time that covers the need.

    Args:
        workload: The day.
        rate: Requests per second that a replica takes.
        start_s: Longest time of a start.
        most: Replicas at most.
        step_s: Length of a moment.
    """

    def __init__(self, workload: Workload, *, rate: float, start_s: float, most: int, step_s: float = 5.0) -> None:
        times = [request.arrival_s for request in workload.requests]
        need = np.ceil(np.bincount((np.asarray(times) // step_s).astype(int)) / step_s / rate)
        need = np.clip(need, 1, most).astype(int)
        ahead = math.ceil(start_s / step_s)
        plan = np.ones(len(need) + ahead, dtype=int)
        for replica in range(2, most + 1):
            places = np.flatnonzero(need >= replica)
            for place, before in zip(places, [-math.inf, *places], strict=False):
                begin = place if place - before - 1 > ahead else int(before) + 1
                plan[max(0, begin - ahead) : place + 1] = replica
        self._plan, self._step_s, self._rate, self._start_s = plan, step_s, rate, start_s

    def decide(self, now: float, load: FleetLoad, *, num_serving: int, num_starting: int) -> ScalingDecision:
        """Return the number of replicas of the plan."""
        place = int(now // self._step_s)
        wanted = int(self._plan[place]) if place < len(self._plan) else 1
        return ScalingDecision(
            num_wanted=wanted,
            num_needed=wanted,
            rate=0.0,
            ahead=0.0,
            safe_rate=self._rate,
            start_s=self._start_s,
        )

    def started(self, took_s: float) -> None:
        """Learn nothing."""

    def predict_capacity(self, rate: float) -> None:
        """Learn nothing."""


def replica_seconds(spans: Sequence[ReplicaSpan]) -> float:
    """Return the time that is paid for: from each order to start a replica to the end of its last request."""
    return sum(span.ended_at - span.asked_at for span in spans)


def count_flaps(spans: Sequence[ReplicaSpan], within_s: float) -> int:
    """Return the starts that were asked for within a time after a drain: they took back a decision."""
    drains = [span.draining_at for span in spans if math.isfinite(span.draining_at)]
    return sum(any(0 <= span.asked_at - drained_at < within_s for drained_at in drains) for span in spans)
