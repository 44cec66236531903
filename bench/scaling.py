"""Scaling on a day of a service with adapters: SLO attainment and replica-hours, against fixed numbers and an oracle.

The day is that of GenTD26, compressed: requests per second of 108 containers that serve image generation with
adapters. Lengths are those of short chats. One to eight simulated replicas of Llama-2 7B on A10s. A start takes as long
as ``--start`` says, before the adapters of a new replica are loaded; by default, three minutes of the day.

    python bench/scaling.py --trace gentd26_qps.csv.gz            # 5 seeds, an hour of processor time
    python bench/scaling.py --trace gentd26_qps.csv.gz --quick    # one seed, a compression of 240, without writing

*Best fixed*: the fewest replicas that reach the goal, all day. *Oracle*: knows every arrival, and starts each replica
just in time; it takes the highest rate per replica that reaches the goal, of those tried. A *flap* is a start that is
asked for within two times of a start after a drain. Replica-hours are hours of the day, from each order to start a
replica to the end of its last request.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from publishing import arguments, publish, table
from tqdm import tqdm
from traces import read_metric

from manylora.core.scaling.autoscaler import Scaler, ScalingDecision, ScalingPolicy
from manylora.core.scaling.watch import FleetLoad
from manylora.lab.measure import Slo
from manylora.lab.sim.run.scaling import ReplicaSpan, SimulatedScaling
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload
from manylora.lab.workloads.workload import FloatArray

RANKS = (8, 16, 32, 64)
NUM_ADAPTERS, ZIPF = 200, 0.92
"""As the adapters of the same service (GenTD26) are asked for."""

BIN_S = 300.0
"""Seconds of the trace over which its rate is taken: each container reports about once a minute."""

PROMPT_MEAN, PROMPT_SIGMA, MOST_PROMPT_TOKENS = 6.2, 0.7, 2000
"""Length of a prompt: mean and deviation of its logarithm, and a bound."""

ANSWER_TOKENS, MOST_ANSWER_TOKENS = 80, 400
"""Length of an answer: mean of an exponential distribution, and a bound."""

TTFT_S, GOAL = 2.0, 0.99
MOST = 8
PEAK_RATE = 20.0
"""Requests per second in the busiest half hour: some seven replicas."""

ORACLE_RATES = (5.0, 4.5, 4.0, 3.5, 3.0, 2.5)
"""Requests per second of a replica, tried in this order."""

Figures = dict[str, float]


def make_day(trace: Path, *, compression: float, peak_rate: float, seed: int) -> Workload:
    """Return the requests of a day whose rate is that of the trace, scaled; arrivals are a Poisson process.

    Args:
        trace: Requests per second of each container of a service, as ``gentd26_qps.csv.gz``.
        compression: Seconds of the trace in one second.
        peak_rate: Requests per second in the busiest half hour of the trace.
        seed: Seeds the times, lengths and adapters.
    """
    at_s, values = read_metric(trace)
    shape = np.bincount(((at_s - at_s.min()) // BIN_S).astype(int), weights=values)
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


def serve(day: Workload, config: SimulationConfig, compression: float, within_s: float) -> Figures:
    """Return the figures of one run."""
    run = simulate(day, config)
    seconds = replica_seconds(run.spans) if config.scaling else config.num_replicas * run.duration_s
    return {
        "attainment": run.summary(slo=Slo(ttft_s=TTFT_S)).slo_attainment,
        "replica_hours": seconds * compression / 3600,
        "starts": float(sum(span.asked_at > 0 for span in run.spans)),
        "flaps": float(count_flaps(run.spans, within_s)),
        "most": float(max((decision.num_wanted for _, decision in run.decisions), default=config.num_replicas)),
    }


def measure(trace: Path, seed: int, *, compression: float, start_s: float) -> dict[str, Figures]:
    """Return the figures of every fleet on one day."""
    day = make_day(trace, compression=compression, peak_rate=PEAK_RATE, seed=seed)
    setup = Setup(model="llama-2-7b", hardware="a10", max_tokens=400, num_replicas=MOST, router="auto")
    config = make_config(setup, seed=seed)
    policy = ScalingPolicy(
        min_replicas=1,
        max_replicas=MOST,
        ttft_s=TTFT_S,
        goal=GOAL,
        start_s=start_s,
        max_num_seqs=config.scheduler.max_num_seqs,
    )

    def scaled(make_scaler: Callable[[], Scaler] | None = None) -> Figures:
        scaling = SimulatedScaling(policy=policy, start_s=start_s, make_scaler=make_scaler)
        return serve(day, replace(config, scaling=scaling), compression, 2 * start_s)

    found = {"scaling": scaled()}
    for rate in ORACLE_RATES:
        longest_s = 1.2 * start_s + policy.look_every_s
        oracle = {"rate": rate} | scaled(lambda: Clairvoyant(day, rate=rate, start_s=longest_s, most=MOST))  # noqa: B023
        found["oracle"] = oracle
        if oracle["attainment"] >= GOAL:
            break
    few, many = 1, MOST  # attainment rises with the number
    while few < many:
        middle = (few + many) // 2
        fixed = serve(day, replace(config, num_replicas=middle), compression, 0.0)
        found[f"{middle} fixed"] = fixed
        few, many = (few, middle) if fixed["attainment"] >= GOAL else (middle + 1, many)
    if f"{few} fixed" not in found:
        found[f"{few} fixed"] = serve(day, replace(config, num_replicas=few), compression, 0.0)
    found["best fixed"] = {"replicas": float(few)} | found[f"{few} fixed"]
    return found


def main() -> None:
    """Serve the day with every fleet."""
    parser = arguments(__doc__, quick="one seed, a compression of 240")
    parser.add_argument("--trace", type=Path, required=True, help="requests per second of containers, as of GenTD26")
    parser.add_argument("--compression", type=float, default=60.0, help="seconds of the day in one second")
    parser.add_argument("--start", type=float, default=3.0, help="seconds of a start, compressed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="days that are simulated at a time")
    options = parser.parse_args()
    compression, num_seeds = (240.0, 1) if options.quick else (options.compression, options.seeds)
    one_day = partial(measure, options.trace, compression=compression, start_s=options.start)
    with ProcessPoolExecutor(options.processes) as pool:
        served = pool.map(one_day, range(num_seeds))
        days = list(tqdm(served, total=num_seeds, desc="days", leave=False, disable=None))
    rows = []
    for fleet in ("scaling", "best fixed", "oracle"):
        ones = [day[fleet] for day in days]

        def mean(key: str, ones: list[Figures] = ones) -> float:
            return statistics.mean(one[key] for one in ones)

        least = min(one["attainment"] for one in ones)
        against = mean("replica_hours") / statistics.mean(day["best fixed"]["replica_hours"] for day in days)
        rows.append(
            [
                fleet,
                f"{100 * mean('attainment'):.2f} %",
                f"{100 * least:.2f} %",
                f"{mean('replica_hours'):.1f}",
                f"{100 * against:.0f} %",
                f"{mean('most'):.1f}",
                f"{mean('starts'):.1f}",
                f"{mean('flaps'):.1f}",
            ]
        )
    heads = [
        "fleet",
        "within the SLO",
        "worst seed",
        "replica-hours",
        "of best fixed",
        "most at once",
        "starts",
        "flaps",
    ]
    minutes = options.start * compression / 60
    lines = [
        "# Scaling on a day of a service with adapters",
        "",
        f"GenTD26, a second for {compression:g} of the day; up to {MOST} replicas of Llama-2 7B on A10s, "
        f"{PEAK_RATE:g} requests/s at the peak; SLO: {100 * GOAL:g} % of first tokens within {TTFT_S:g} s; "
        f"a start takes {options.start:g} s ({minutes:g} minutes of the day). Mean of {num_seeds} seeds.",
        f"`python bench/scaling.py --trace {options.trace.name} --compression {compression:g} "
        f"--start {options.start:g} --seeds {num_seeds}`",
        "",
        *table(heads, rows),
    ]
    figures = {"compression": compression, "start_s": options.start, "goal": GOAL, "days": days}
    publish("scaling", figures, "\n".join(lines), is_kept=not options.quick)


if __name__ == "__main__":
    main()
