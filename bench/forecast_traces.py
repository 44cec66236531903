"""Does the simulator predict what runs, on traces that nothing was fitted on? Three systems, two traces of Azure.

    python bench/forecast_traces.py --traces DIR [--system cpu --system devices --system vllm] [--minutes 7] [--quick]

*cpu* is the engine of `forecast.py` on this processor, priced by a sweep of synthetic steps. *devices* is `manylora
serve` over HTTP, two engines that wait as long as an A40 under Llama-7B would take: what the data sheet leaves out, the
time of a turn and of HTTP, are two constants of a run with drawn lengths. *vllm* is vLLM on this processor, with slots
and loads that steps wait for (`forecast_vllm.py`), priced as *cpu* is; it needs the environment of `make vllm`. A run
of some systems leaves what was found of the others in the page.

Round by round other stretches of a trace are served, lengths scaled as `examples/chameleon.toml` does and clipped,
adapters drawn by a Zipf law. Gaps are scaled by one factor: a load of 85 % lasts as long as the simulator predicts for
the same requests all at once, over 0.85. Beside each live run the same requests are simulated, on drawn speeds several
times, of which the median figure counts: it is that of one run, too. *Once* knows the sweep before the first run; *just
before* knows the speed of a few seconds of drawn requests before each run as well. No prediction knows anything of a
run of a trace. On a processor an explanation stands beside them: *its own speed* knows how much longer than their price
the steps of the run took, in windows of two seconds, and draws nothing. What it misses is in prices or decisions; what
the predictions miss beyond it is the speed of the machine.

The statistic is the ratio of predicted to live of a run, its median over rounds, with a 95 % interval of the median.
A goal is met where the whole interval is within it, and missed where none of it is.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from forecast import Predicted, calibrate, engine_of
from forecast_systems import (
    GOALS,
    HARDWARE,
    MODEL,
    NUM_DEVICES,
    OWN,
    ROUTER,
    SYNTHETIC,
    Devices,
    Priced,
    System,
    at_load,
    figures_of,
    middle,
)
from forecast_vllm import NUM_HOST, NUM_SLOTS, start_vllm
from live import write_adapters
from planner_live import MEMORY, NUM_ADAPTERS, SCHEDULER, WORKLOAD, Live
from publishing import RESULTS, Others, Steps, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round
from route import started

from manylora.core.config import AdapterConfig, EngineConfig, ModelConfig
from manylora.core.costs.step_log import LogLine
from manylora.demo import demo_model_path
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import in_turns
from manylora.lab.workloads import Workload, make_workload
from manylora.lab.workloads.arrivals import ReplayArrivals
from manylora.lab.workloads.lengths import ReplayLengths, TokenBounds

TRACES = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
SCALE = 0.173
BOUNDS = TokenBounds(min_prompt=2, max_prompt=1200, max_output=400)
LOADS = (0.5, 0.85)
SYSTEMS = ("cpu", "devices", "vllm")
VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
TITLE = f"""
# Live and predicted, on two traces

Each live run is of another stretch of a trace, over {NUM_ADAPTERS} adapters. Ratios of predicted to live are the
medians of runs, with 95 % intervals.
"""


def stretch(file: Path, number: int, num_requests: int) -> Workload:
    """Return requests of a trace from the ``number``-th stretch of so many, from time 0."""
    spec = replace(
        WORKLOAD,
        arrivals=ReplayArrivals(file=file),
        lengths=ReplayLengths(file=file, scale=SCALE, bounds=BOUNDS),
        num_requests=(number + 1) * num_requests,
    )
    whole = make_workload(spec, number)
    kept = whole.requests[number * num_requests :]
    return replace(whole, requests=tuple(replace(one, arrival_s=one.arrival_s - kept[0].arrival_s) for one in kept))


def verdict(ratio: Ratio, goal: float) -> str:
    """Return whether the interval of a ratio is within a goal, outside it, or neither."""
    if 1 - goal <= ratio.low and ratio.high <= 1 + goal:
        return "met"
    return "missed" if ratio.high < 1 - goal or ratio.low > 1 + goal else "open"


def measure(system: System, traces: Path, rounds: int, minutes: float) -> list[dict[str, Any]]:
    """Serve and predict every trace at every load; return the figures of each round."""
    num_requests = {}
    for name, file in TRACES.items():
        sample = stretch(traces / file, 0, 300)
        share_s = 60 * minutes / rounds / len(TRACES) / sum(1 / load for load in LOADS)
        num_requests[name] = max(20, int(300 * share_s / system.busy_s(sample)))
    rows: dict[str, dict[str, Any]] = {
        f"{name}/{load}": {"trace": name, "load": load, "requests": num_requests[name], "live": [], "predicted": {}}
        for name, load in product(TRACES, LOADS)
    }
    steps = Steps(rounds * len(rows))
    for number, cell in in_turns(list(rows), rounds, num_warm_up=0):
        row = rows[cell]
        requests = stretch(traces / TRACES[row["trace"]], number, row["requests"])
        workload = at_load(requests, system.busy_s(requests), row["load"])
        system.learn()
        row["live"].append(figures_of(system.live(workload)))
        for known, runs in system.predicted(workload, f"{cell}/{number}").items():
            row["predicted"].setdefault(known, []).append(middle(runs))
        errors = {
            known: " ".join(f"{of[-1][one] / row['live'][-1][one] - 1:+.1%}" for one in GOALS)
            for known, of in row["predicted"].items()
        }
        steps.done(f"{cell}, round {number + 1}: {errors}")
    return list(rows.values())


def section(name: str, figures: dict[str, Any]) -> str:
    """Return the figures of a system as Markdown."""
    rows, met = [], [0, 0]
    for row in figures["rows"]:
        for known, figure in product(row["predicted"], GOALS):
            live, predicted = ([one[figure] for one in of] for of in (row["live"], row["predicted"][known]))
            ratio, goal = ratio_by_round(predicted, live), GOALS[figure]
            found = verdict(ratio, goal)
            met[known == OWN] += found == "met"
            middles = [statistics.median(one) * (1 if figure == "throughput" else 1e3) for one in (live, predicted)]
            rows.append(
                [
                    row["trace"],
                    f"{row['load']:.0%}",
                    f"{figure} ({'tokens/s' if figure == 'throughput' else 'ms'})",
                    known,
                    *(f"{one:,.0f}" for one in middles),
                    f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
                    f"± {goal:.0%}",
                    found,
                ]
            )
    num_explained = sum(row[3] == OWN for row in rows)
    explained = (
        "" if not num_explained else f" With *{OWN}*, which explains and does not predict, {met[1]} of {num_explained}."
    )
    heads = ("trace", "load", "figure", "known", "live", "predicted", "ratio", "goal", "verdict")
    lines = [
        f"## {name}",
        "",
        f"`{figures['command']}` on {figures['machine']}; other processes took {figures['busy_share']:.1%} of the "
        f"machine's processor time. {figures['rounds']} live runs of each row. {figures['about']}. {met[0]} of "
        f"{len(rows) - num_explained} met.{explained if num_explained else ''}",
        "",
        *table(heads, rows, left=4),
    ]
    return "\n".join(lines)


def page(found: dict[str, str], kept: str) -> str:
    """Return the page with the sections that were found, and of other systems those of the page that is kept."""
    old = {text.partition("\n")[0]: f"## {text.strip()}" for text in kept.split("\n## ")[1:]}
    sections = old | found
    return "\n\n".join([TITLE.strip(), *(sections[name] for name in SYSTEMS if name in sections)])


def main() -> None:
    """Measure the systems and publish."""
    parser = arguments(__doc__, quick="one round, a minute for each system")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="one of them; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.0, help="of live runs of each system")
    parser.add_argument("--sweep", type=float, default=90.0, help="seconds of calibration")
    parser.add_argument("--vllm", type=Path, default=VLLM, metavar="PYTHON", help="of the environment of vLLM")
    options = parser.parse_args()
    look_s = 6.0
    if options.quick:
        options.rounds, options.minutes, options.sweep, look_s = 1, 0.7, 15.0, 3.0
    torch.set_num_threads(1)
    names = options.system or [one for one in SYSTEMS if one != "vllm" or options.vllm.exists()]
    figures = {name: run(name, options, look_s) for name in SYSTEMS if name in names}
    file, busy = RESULTS / "forecast_traces.md", max(one["busy_share"] for one in figures.values())
    text = page({name: section(name, one) for name, one in figures.items()}, file.read_text() if file.exists() else "")
    refused = reason_to_refuse(options.rounds, busy)
    publish("forecast_traces", figures, text, is_kept=not options.quick, refused=refused)


def run(name: str, options: argparse.Namespace, look_s: float) -> dict[str, Any]:
    """Build a system, and return its figures."""
    others = Others()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forecast-")))
        make = {"cpu": make_cpu, "devices": make_devices, "vllm": make_vllm}[name]
        system = make(stack, folder, options, look_s)
        rows = measure(system, options.traces, options.rounds, options.minutes)
        about = system.about()
    return {
        "command": f"python bench/forecast_traces.py --traces DIR --system {name} --minutes {options.minutes:g}",
        "machine": describe_machine(torch.device("cpu")),
        "busy_share": others.share(),
        "rounds": options.rounds,
        "about": about,
        "rows": rows,
    }


def make_cpu(stack: contextlib.ExitStack, folder: Path, options: argparse.Namespace, look_s: float) -> System:
    """Build the engine here."""
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu"),
        memory=MEMORY,
        scheduler=SCHEDULER,
        adapters=AdapterConfig(),
    )
    machine, log = calibrate(config, options.sweep), list[LogLine]()
    engine = Live(config, SYNTHETIC, folder, log.append)
    stack.callback(engine.close)
    return Priced("The demo model", engine, log, machine, Predicted(machine, engine_of(machine, folder)), look_s=look_s)


def make_vllm(stack: contextlib.ExitStack, folder: Path, options: argparse.Namespace, look_s: float) -> System:
    """Build vLLM's engine."""
    log: list[LogLine] = []
    machine, engine, simulator = start_vllm(SYNTHETIC, folder, options.vllm, log.append, options.sweep)
    stack.callback(engine.close)
    name = f"vLLM, {NUM_SLOTS} slots, {NUM_HOST} adapters in host memory,"
    return Priced(name, engine, log, machine, simulator, look_s=look_s)


def make_devices(stack: contextlib.ExitStack, folder: Path, options: argparse.Namespace, look_s: float) -> System:
    """Build the server."""
    write_adapters(folder, SYNTHETIC)
    command = ["serve", str(demo_model_path()), "--served-model-name", "demo", "--lora-dir", str(folder)]
    command += ["--simulate", f"{HARDWARE}:{MODEL}", "--replicas", str(NUM_DEVICES), "--no-prefix-caching"]
    command += ["--router", ROUTER]
    command += ["--max-num-seqs", str(SCHEDULER.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(SCHEDULER.max_num_batched_tokens)]
    (url,) = stack.enter_context(started(command))
    return Devices(url)


if __name__ == "__main__":
    main()
