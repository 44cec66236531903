"""How fast the simulator is: the Azure conversation trace, as it was recorded, on one A40 at saturation.

Every request of the trace keeps its lengths; its timestamps are stretched so that the card is just saturated. A
hundred adapters, Chameleon's scheduling and cache. The run is timed as it is; where the time goes is then told by a
profiler, on the first requests of the same run, because a profiler makes small functions look slow.

Run it: `python bench/simulator.py --traces DIR` (`--quick` for a smoke test). It writes `results/simulator.json` and
`.md`.
"""

from __future__ import annotations

import cProfile
import platform
import pstats
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

from publishing import arguments, publish

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.events import Event
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSet, Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import ReplayArrivals
from manylora.lab.workloads.lengths import ReplayLengths
from manylora.lab.workloads.popularity import RankShares

TRACE = "AzureLLMInferenceTrace_conv.csv"
RATE = 1.5  # requests per second: near the most at which the queue does not grow from start to end
NUM_PROFILED = 2000
GOAL_S, GOAL_BYTES = 60.0, 1e9
SETUP = Setup(
    model="llama-7b",
    hardware="a40",
    max_model_len=16_384,  # the trace's longest prompt has 14,050 tokens
    scheduler=SchedulerConfig(
        policy="chameleon", predictor="noisy", max_num_seqs=256, max_num_batched_tokens=512, max_waiting=1_000_000
    ),
    adapters=AdapterConfig(eviction="chameleon", host_bytes=1 << 50),
)


def trace_workload(folder: Path, rate: float, num_requests: int | None = None) -> Workload:
    """Return the trace with its own lengths and its own timestamps, stretched to a rate."""
    spec = WorkloadSpec(
        name="azure conversation",
        arrivals=ReplayArrivals(file=folder / TRACE, rate=rate),
        lengths=ReplayLengths(file=folder / TRACE),
        adapters=AdapterSet(count=100),
        popularity=RankShares(),
    )
    workload = make_workload(spec, seed=0)
    return workload if num_requests is None else replace(workload, requests=workload.requests[:num_requests])


def timed(workload: Workload) -> tuple[dict[str, float], Counter[str]]:
    """Simulate, look at the clock, and count events by kind, which is in the time; times in seconds of one core."""
    config, events = make_config(SETUP), Counter[str]()

    def count(event: Event) -> None:
        events[type(event).__name__] += 1

    began_s, began_cpu_s = perf_counter(), process_time()
    run = simulate(workload, config, sinks=(count,))
    wall_s, cpu_s = perf_counter() - began_s, process_time() - began_cpu_s
    (stats,), (timeline,) = run.stats, run.timelines
    summary = run.summary()
    assert summary.ttft is not None
    return {
        "requests": len(workload.requests),
        "virtual_s": run.duration_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "steps": stats.num_steps,
        "answer_tokens": stats.num_generated_tokens,
        "prompt_tokens": stats.num_prompt_tokens,
        "events": events.total(),
        "us_per_step": 1e6 * cpu_s / stats.num_steps,
        "us_per_token": 1e6 * cpu_s / stats.num_generated_tokens,
        "sequences_per_step": sum(timeline.steps.num_sequences) / stats.num_steps,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ttft_p50_s": summary.ttft.p50,
        "longest_queue": int(max(timeline.gauges["num_waiting"])),
    }, events


def profiled(task: Callable[[], object]) -> list[tuple[str, float]]:
    """Return each module's share of the time that a task takes in its own code, largest first."""
    profiler = cProfile.Profile()
    profiler.runcall(task)
    by_module: Counter[str] = Counter()
    for (file, _, _), (_, _, own_s, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        module = file.partition("manylora/")[2] if "manylora/" in file else "built-in functions"
        by_module[module] += own_s
    total_s = sum(by_module.values())
    return [(module, own_s / total_s) for module, own_s in by_module.most_common()]


def report(speed: dict[str, float], shares: list[tuple[str, float]], command: str) -> str:
    """Return the result for people."""
    lines = [
        "# How fast the simulator is",
        "",
        f"`{command}`: Python {platform.python_version()} on {platform.machine()}, one core. The Azure conversation "
        f"trace with its own lengths, its timestamps stretched to {RATE:g} requests a second; Llama-7B on an A40, 100 "
        "adapters, Chameleon's scheduling and cache.",
        "",
        "| | | goal |",
        "|---|---:|---:|",
        f"| requests | {speed['requests']:,} | |",
        f"| virtual time | {speed['virtual_s']:,.0f} s | |",
        f"| **processor time** | **{speed['cpu_s']:.1f} s** | {GOAL_S:.0f} s |",
        f"| wall time, with {speed['cpu_s'] / speed['wall_s']:.0%} of a core | {speed['wall_s']:.1f} s | |",
        f"| virtual over processor time | {speed['virtual_s'] / speed['cpu_s']:,.0f} | |",
        f"| steps | {speed['steps']:,} | |",
        f"| sequences a step | {speed['sequences_per_step']:.1f} | |",
        f"| answer tokens | {speed['answer_tokens']:,} | |",
        f"| prompt tokens | {speed['prompt_tokens']:,} | |",
        f"| events | {speed['events']:,} | |",
        f"| processor time a step | {speed['us_per_step']:.0f} us | |",
        f"| processor time a sequence in a step | {speed['us_per_step'] / speed['sequences_per_step']:.1f} us | |",
        f"| **peak memory** | **{speed['peak_rss_bytes'] / 1e6:.0f} MB** | {GOAL_BYTES / 1e6:,.0f} MB |",
        f"| median time to first token, virtual | {speed['ttft_p50_s']:.2f} s | |",
        f"| most requests waiting | {speed['longest_queue']:,} | |",
        "",
        f"Where the time goes, own code of each module over the first {NUM_PROFILED:,} requests, under a profiler:",
        "",
        "| module | share |",
        "|---|---:|",
        *(f"| `{module}` | {share:.1%} |" for module, share in shares[:14]),
        "",
        "Steps, tokens and virtual time follow from the seed and are the same anywhere; times are this machine's. "
        "Where less than a core was free, processor time is about what it would have taken alone.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__, quick="five hundred requests")
    parser.add_argument("--traces", metavar="DIR", type=Path, required=True, help=f"folder of {TRACE}")
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second")
    options = parser.parse_args()
    workload = trace_workload(options.traces, options.rate, 500 if options.quick else None)
    speed, events = timed(workload)
    print(speed)
    if options.quick:
        return
    head = replace(workload, requests=workload.requests[:NUM_PROFILED])
    shares = profiled(lambda: simulate(head, make_config(SETUP)))
    figures = {"rate": options.rate, **speed, "events_by_kind": dict(events), "own_time": dict(shares)}
    publish("simulator", figures, report(speed, shares, "python bench/simulator.py --traces DIR"))


if __name__ == "__main__":
    main()
