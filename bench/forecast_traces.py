"""Does the simulator predict what runs, on traces that nothing was fitted on? Two systems, two traces of Azure.

    python bench/forecast_traces.py --traces DIR [--system cpu] [--system devices] [--minutes 7] [--quick]

*cpu* is the engine of `forecast.py` on this processor, priced by a sweep of synthetic steps. *devices* is `manylora
serve` over HTTP, two engines that wait as long as an A40 under Llama-7B would take: what the data sheet leaves out, the
time of a turn and of HTTP, are two constants of a run with drawn lengths.

Round by round other stretches of a trace are served, lengths scaled as `examples/chameleon.toml` does and clipped,
adapters drawn by a Zipf law. Gaps are scaled by one factor: a load of 85 % lasts as long as the simulator predicts for
the same requests all at once, over 0.85. Beside each live run the same requests are simulated, on drawn speeds several
times, of which the median figure counts: it is that of one run, too. *Once* knows the sweep before the first run; *just
before* knows the speed of a few seconds of drawn requests before each run as well. No prediction knows anything of a
run of a trace.

The statistic is the ratio of predicted to live of a run, its median over rounds, with a 95 % interval of the median.
A goal is met where the whole interval is within it, and missed where none of it is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from forecast import Predicted, calibrate, seconds_of, speeds_of
from live import VOCABULARY, http_arrivals, write_adapters
from planner_live import MEMORY, NUM_ADAPTERS, SCHEDULER, WORKLOAD, Live
from publishing import Others, Steps, arguments, publish, reason_to_refuse, table
from route import started

from manylora.core.config import AdapterConfig, EngineConfig, ModelConfig
from manylora.core.costs.step_log import LogLine
from manylora.demo import demo_model_path
from manylora.execution.device import describe_machine
from manylora.lab.bench.load import run_load
from manylora.lab.bench.rounds import Ratio, in_turns, ratio_by_round
from manylora.lab.bench.target import Target
from manylora.lab.measure import RequestRecord
from manylora.lab.measure.summary import gaps_of
from manylora.lab.planning.load_test import at_rate
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import Workload, make_workload
from manylora.lab.workloads.arrivals import ReplayArrivals
from manylora.lab.workloads.lengths import ReplayLengths, TokenBounds

TRACES = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
SCALE = 0.173
BOUNDS = TokenBounds(min_prompt=2, max_prompt=1200, max_output=400)
LOADS = (0.5, 0.85)
GOALS = {"throughput": 0.03, "first token, P50": 0.10, "first token, P99": 0.20}
"""Figures, and the largest error of a prediction that is good enough."""

ONCE, BEFORE = "once", "just before"
SYNTHETIC = make_workload(replace(at_rate(WORKLOAD, 1.0), num_requests=200), 99)
DRAWS = 7
"""Simulated runs beside a live one, where the machine's speed is drawn."""

LOOK_LOAD = 0.7
"""Load of the drawn requests that tell the speed of the moment."""

NUM_DEVICES, HARDWARE, MODEL = 2, "a40", "llama-7b"
ROUTER = "least-loaded"
"""Of the server and its simulation: where an adapter was before decides nothing."""

Records = list[RequestRecord]


class System(Protocol):
    """A system that serves, and its simulation."""

    def about(self) -> str:
        """Return the system, and what was learnt of it, in words."""
        ...

    def busy_s(self, workload: Workload) -> float:
        """Return how long the requests are predicted to take if all are there at once."""
        ...

    def learn(self) -> None:
        """Measure drawn requests, before each live run."""
        ...

    def live(self, workload: Workload) -> Records:
        """Serve requests at their times, and return their records in order of arrival."""
        ...

    def predicted(self, workload: Workload, name: str) -> dict[str, list[Records]]:
        """Return simulated runs, seeded by a name, by what they know."""
        ...


class Cpu:
    """The engine on this processor, one thread for the model, without a server."""

    def __init__(self, folder: Path, *, sweep_s: float, look_s: float) -> None:
        self._config = EngineConfig(
            model=ModelConfig(model=str(demo_model_path()), device="cpu"),
            memory=MEMORY,
            scheduler=SCHEDULER,
            adapters=AdapterConfig(),
        )
        self._look_s = look_s
        self._machine = calibrate(self._config, sweep_s)
        self._simulator = Predicted(self._machine, folder)
        self._before: Sequence[float] = self._machine.speeds
        self._log: list[LogLine] = []
        self._times_price: dict[str, list[float]] = {"synthetic": [], "live": []}
        self._engine = Live(self._config, SYNTHETIC, folder, self._log.append)
        self._synthetic_s = self.busy_s(SYNTHETIC)
        self._engine.serve(at_load(SYNTHETIC, self._synthetic_s, 0.5))  # warm up

    def about(self) -> str:
        """Return the system, and the time of steps over their price, run by run."""
        ratios = ratio_by_round(self._times_price["live"], self._times_price["synthetic"])
        times = {name: statistics.median(one) for name, one in self._times_price.items()}
        return (
            f"The demo model on this processor, one thread. Steps of drawn requests just before a run took "
            f"{times['synthetic']:.2f} times the sweep's price, those of the run {times['live']:.2f}: "
            f"a ratio of {ratios}"
        )

    def busy_s(self, workload: Workload) -> float:
        """Return the mean over simulated runs."""
        at_once = replace(workload, requests=tuple(replace(one, arrival_s=0.0) for one in workload.requests))
        runs = [self._simulator.serve(at_once, f"busy/{draw}", self._machine.speeds) for draw in range(DRAWS)]
        return statistics.mean(max(one.finished_at for one in run) for run in runs)

    def learn(self) -> None:
        """Measure the speed of this moment on the engine itself, by other drawn requests each time."""
        rate = LOOK_LOAD * len(SYNTHETIC.requests) / self._synthetic_s
        spec = replace(at_rate(WORKLOAD, rate), num_requests=max(20, int(rate * self._look_s)))
        self._before, _ = self._serve(make_workload(spec, 100 + len(self._times_price["synthetic"])), "synthetic")

    def _serve(self, workload: Workload, kind: str) -> tuple[tuple[float, ...], Records]:
        """Serve requests; return the speed of their steps, window by window, and their records."""
        self._log.clear()
        records = self._engine.serve(workload)
        speeds = speeds_of(self._machine.profile, self._log)
        self._times_price[kind].append(statistics.mean(speeds))
        return speeds, records

    def live(self, workload: Workload) -> Records:
        """Serve requests on the wall clock."""
        return self._serve(workload, "live")[1]

    def predicted(self, workload: Workload, name: str) -> dict[str, list[Records]]:
        """Return runs on a machine of drawn speeds."""
        speeds = {ONCE: self._machine.speeds, BEFORE: self._before}
        return {
            known: [self._simulator.serve(workload, f"{name}/{draw}", one) for draw in range(DRAWS)]
            for known, one in speeds.items()
        }

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class Devices:
    """A server over HTTP, whose engines wait instead of computing; every adapter is on the device."""

    def __init__(self, url: str) -> None:
        # A token without text would be seen when the next one comes: the first token of one answer in ten.
        self._target = Target(url=url, extra={"skip_special_tokens": False})
        setup = Setup(
            model=MODEL,
            hardware=HARDWARE,
            num_replicas=NUM_DEVICES,
            router=ROUTER,
            scheduler=SCHEDULER,
            exact_caps=True,
            all_resident=True,
        )
        self._config = make_config(setup, targets=WORKLOAD.adapters.targets)
        self._turn_s = self._http_s = 0.0
        everyone = tuple(  # at the same time as many as there are engines: each gets one, and loads the adapter
            replace(SYNTHETIC.requests[0], adapter=one.name, arrival_s=0.3 * index)
            for index, one in enumerate(SYNTHETIC.adapters)
            for _ in range(NUM_DEVICES)
        )
        self.live(replace(SYNTHETIC, requests=everyone))  # warm up
        self._fit(at_load(SYNTHETIC, self.busy_s(SYNTHETIC), 0.5))

    def _fit(self, workload: Workload) -> None:
        """Find the time of a turn, by the gaps between tokens, and then that of HTTP, by first tokens."""
        live, simulated = self.live(workload), self._simulate(workload)
        self._turn_s = max(0.0, float(gaps_of(live).mean() - gaps_of(simulated).mean()))
        self._config = replace(self._config, scheduler_time_s=self._turn_s)
        medians = [np.median(seconds_of(one, "first token")) for one in (live, self._simulate(workload))]
        self._http_s = float(medians[0] - medians[1])

    def about(self) -> str:
        """Return the system, and its two constants."""
        return (
            f"`manylora serve --router {ROUTER}` over HTTP, {NUM_DEVICES} engines that wait as {HARDWARE}:{MODEL}. "
            f"Constants of the run with drawn lengths: a turn {1e3 * self._turn_s:.2f} ms, "
            f"HTTP {1e3 * self._http_s:.2f} ms"
        )

    def _simulate(self, workload: Workload) -> Records:
        records = simulate(workload, self._config).records
        late_s = self._http_s
        return [
            replace(one, first_token_at=one.arrived_at + one.ttft_s + late_s, finished_at=one.finished_at + late_s)
            for one in records
            if one.ttft_s is not None
        ]

    def busy_s(self, workload: Workload) -> float:
        """Return the time of one simulated run: nothing in it is drawn."""
        at_once = replace(workload, requests=tuple(replace(one, arrival_s=0.0) for one in workload.requests))
        return max(one.finished_at for one in self._simulate(at_once))

    def learn(self) -> None:
        """Measure nothing: a device that waits does not drift."""

    def live(self, workload: Workload) -> Records:
        """Send requests at their times."""
        run = asyncio.run(run_load(self._target, http_arrivals(workload, self._target, VOCABULARY)))
        records = sorted((one.record for one in run.answers), key=lambda one: int(one.request_id))
        wrong = [one.error for one in records if one.error is not None]
        assert not wrong, wrong[0]
        return records

    def predicted(self, workload: Workload, name: str) -> dict[str, list[Records]]:
        """Return the only run there is."""
        return {ONCE: [self._simulate(workload)]}


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


def at_load(workload: Workload, busy_s: float, load: float) -> Workload:
    """Return a workload with its gaps scaled, so that it would keep the system busy for a share of its time."""
    factor = busy_s / load / workload.duration_s
    return replace(
        workload, requests=tuple(replace(one, arrival_s=factor * one.arrival_s) for one in workload.requests)
    )


def figures_of(run: Records) -> dict[str, float]:
    """Return tokens a second, from the first arrival to the last token, and percentiles of first tokens in seconds."""
    took_s = max(one.finished_at for one in run) - min(one.arrived_at for one in run)
    first_s = seconds_of(run, "first token")
    return {
        "throughput": sum(one.num_output_tokens for one in run) / took_s,
        **{f"first token, P{percentile}": float(np.percentile(first_s, percentile)) for percentile in (50, 99)},
    }


def middle(runs: Sequence[Records]) -> dict[str, float]:
    """Return the median of each figure over runs."""
    figures = [figures_of(run) for run in runs]
    return {name: statistics.median(one[name] for one in figures) for name in GOALS}


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


def page(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# Live and predicted, on two traces",
        "",
        f"`{figures['command']}` on {figures['machine']}: {figures['rounds']} live runs of each row, of other "
        f"stretches of the trace, {NUM_ADAPTERS} adapters. Other processes took {figures['busy_share']:.1%} of the "
        "machine's processor time. Ratios of predicted to live are the medians of runs, with 95 % intervals.",
    ]
    for name, system in figures["systems"].items():
        rows, met = [], 0
        for row in system["rows"]:
            for known, figure in product(row["predicted"], GOALS):
                live, predicted = ([one[figure] for one in of] for of in (row["live"], row["predicted"][known]))
                ratio, goal = ratio_by_round(predicted, live), GOALS[figure]
                found = verdict(ratio, goal)
                met += found == "met"
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
        heads = ("trace", "load", "figure", "known", "live", "predicted", "ratio", "goal", "verdict")
        lines += ["", f"## {name}", "", f"{system['about']}. {met} of {len(rows)} met.", ""]
        lines += table(heads, rows, left=4)
    return "\n".join(lines)


def main() -> None:
    """Measure the systems and publish."""
    parser = arguments(__doc__, quick="one round, a minute for each system")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--system", action="append", choices=("cpu", "devices"), help="one of them; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.0, help="of live runs of each system")
    parser.add_argument("--sweep", type=float, default=90.0, help="seconds of calibration")
    options = parser.parse_args()
    look_s = 6.0
    if options.quick:
        options.rounds, options.minutes, options.sweep, look_s = 1, 0.7, 15.0, 3.0
    torch.set_num_threads(1)
    others = Others()
    systems = {one: run(one, options, look_s) for one in options.system or ("cpu", "devices")}
    figures = {
        "command": f"python bench/forecast_traces.py --traces DIR --minutes {options.minutes:g}",
        "machine": describe_machine(torch.device("cpu")),
        "busy_share": others.share(),
        "rounds": options.rounds,
        "systems": systems,
    }
    refused = reason_to_refuse(options.rounds, figures["busy_share"])
    publish("forecast_traces", figures, page(figures), is_kept=not options.quick, refused=refused)


def run(name: str, options: argparse.Namespace, look_s: float) -> dict[str, Any]:
    """Build a system, and return its figures."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forecast-")))
        system: Cpu | Devices
        if name == "cpu":
            system = Cpu(folder, sweep_s=options.sweep, look_s=look_s)
            stack.callback(system.close)
        else:
            write_adapters(folder, SYNTHETIC)
            command = ["serve", str(demo_model_path()), "--served-model-name", "demo", "--lora-dir", str(folder)]
            command += ["--simulate", f"{HARDWARE}:{MODEL}", "--replicas", str(NUM_DEVICES), "--no-prefix-caching"]
            command += ["--router", ROUTER]
            command += ["--max-num-seqs", str(SCHEDULER.max_num_seqs)]
            command += ["--max-num-batched-tokens", str(SCHEDULER.max_num_batched_tokens)]
            (url,) = stack.enter_context(started(command))
            system = Devices(url)
        rows = measure(system, options.traces, options.rounds, options.minutes)
        return {"about": system.about(), "rows": rows}


if __name__ == "__main__":
    main()
