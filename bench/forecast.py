"""Does the simulator predict a live engine, by load? Nothing is replayed.

    python bench/forecast.py [--quick] [--minutes 20]

A sweep counts the work of steps apart from the machine's speed. *Work* is the processor time of the engine's process,
one thread for the model, which leaves out the time that the machine gave to others; prices of steps are fitted to it.
*Speed* is measured over priced time in windows of two seconds, over the whole sweep: a series with the machine's slow
periods in it. A simulated run draws blocks of that series, and the noise of single steps within a window.

Then the demo model serves Poisson arrivals on the wall clock at 50, 70, 85 and 95 % of the throughput that the
simulator predicts for a queue without end, in rounds that take the loads in turn. Every live run has simulated ones of
the same requests beside it, of two kinds: *once* knows the sweep, *so far* also the speed of the live runs before this
one, which are priced in the same way. A percentile is that of all requests of a load's runs; its 95 % interval
resamples whole runs, on both sides. Last, the rate at which the live engine meets the P90 that is predicted for 85 %.

Writes `bench/results/forecast.json` and `.md`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from planner_live import MEMORY, NUM_ADAPTERS, RANKS, SCHEDULER, WORKLOAD, Live
from publishing import Others, arguments, publish, reason_to_refuse, table

from manylora.core.config import AdapterConfig, EngineConfig, ModelConfig
from manylora.core.costs.step_log import LoadRecord, LogLine, StepRecord
from manylora.demo import demo_model_path
from manylora.execution.build import build_parts
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import in_turns
from manylora.lab.bench.sweep import sweep_live
from manylora.lab.costs.calibrate import fit_profile, noise_of, predict_times
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.profile import CostProfile
from manylora.lab.experiments.findings import crossing
from manylora.lab.measure import RequestRecord
from manylora.lab.planning.load_test import at_rate
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import Workload, make_workload
from manylora.lab.workloads.arrivals import PoissonArrivals

LINKS = ("host", "device")
LOADS = (0.5, 0.7, 0.85, 0.95)
PLANNED = 0.85
WINDOW_S = 2.0
BLOCK = 10
"""Windows in a block: slow periods of up to twenty seconds keep their shape."""

DRAWS = 4
"""Simulated runs beside each live one."""

KNOWLEDGE = ("once", "so far")
"""What a prediction knows of the machine's speed: the sweep; also the live runs before the one that is predicted."""

WARM_UP = 0.1
"""Share of a run's first requests that are not counted."""

RESAMPLES = 2000
FIGURES = (("first token", 50), ("first token", 99), ("between tokens", 50), ("between tokens", 99))

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Machine:
    """The calibration.

    Args:
        profile: Prices of steps in processor time, and the noise of single steps within a window.
        speeds: Measured over priced time, window by window.
        unsteadiness: Coefficient of variation over steps, of wall time and of processor time, each over its own price.
    """

    profile: CostProfile
    speeds: tuple[float, ...]
    unsteadiness: dict[str, float]


@dataclass(slots=True)
class Metered:
    """Takes an engine's log, and the processor time that the process spent on each step; the first is not kept."""

    lines: list[LogLine] = field(default_factory=list)
    spent_s: list[float] = field(default_factory=list)
    _before_s: float | None = None

    def __call__(self, line: LogLine) -> None:
        if isinstance(line, StepRecord):
            before_s, self._before_s = self._before_s, time.process_time()
            if before_s is None:
                return  # whatever was before it, such as building the engine
            self.spent_s.append(self._before_s - before_s)
        self.lines.append(line)


class DrawnSpeed:
    """The speed of a machine over time: blocks of a measured series, drawn as they are reached."""

    def __init__(self, speeds: Sequence[float], rng: Random) -> None:
        self._measured, self._rng = speeds, rng
        self._drawn: list[float] = []

    def factor(self, now: float) -> float:
        """Return the factor on a step that begins now."""
        place = int(now / WINDOW_S)
        while len(self._drawn) <= place:
            first = self._rng.randrange(max(1, len(self._measured) - BLOCK + 1))
            self._drawn += self._measured[first : first + BLOCK]
        return self._drawn[place]


def calibrate(config: EngineConfig, seconds: float) -> Machine:
    """Sweep over a live engine; count work and speed apart."""
    log = Metered()
    sweep_live(
        build_parts,
        config,
        num_adapters=NUM_ADAPTERS,
        ranks=RANKS,
        targets=WORKLOAD.adapters.targets,
        seconds=seconds,
        write=log,
    )
    return machine_of(log.lines, log.spent_s)


def machine_of(lines: Sequence[LogLine], spent_s: Sequence[float]) -> Machine:
    """Return the calibration by the log of a sweep, and the processor time of each of its steps."""
    steps = [line for line in lines if isinstance(line, StepRecord)]
    loads = [line for line in lines if isinstance(line, LoadRecord)]
    took, spent = np.array([one.took_s for one in steps]), np.array(spent_s)
    # In units of the mean speed, so that a factor of 1 is the machine as it was.
    worked = iter((spent * took.sum() / spent.sum()).tolist())
    as_work = [
        msgspec.structs.replace(line, ended_at=line.launched_at + next(worked), device_s=None)
        if isinstance(line, StepRecord)
        else line
        for line in lines
    ]
    fitted = fit_profile(as_work, command="bench/forecast.py")
    # The noise of steps is that of wall time within a window, found below; a price is without it.
    of_loads = {kind: one for kind, one in fitted.noise.items() if kind in LINKS}
    profile = msgspec.structs.replace(fitted, noise=of_loads, speed_drift=None)
    priced = predict_times(profile, steps, loads)
    windows = windows_of(np.array([one.launched_at for one in steps]))
    speeds = over_windows(windows, took, priced)
    within = took / speeds[windows]
    is_prompt = np.array([one.features.num_prompts > 0 for one in steps])
    kinds = (("decode", ~is_prompt), ("prompt", is_prompt))
    noise = {kind: noise_of(within[of], priced[of]) for kind, of in kinds if of.any()}
    by_wall = predict_times(fit_profile(lines), steps, loads)
    unsteadiness = {"wall": variation(took / by_wall), "processor": variation(spent / priced)}
    return Machine(msgspec.structs.replace(profile, noise={**of_loads, **noise}), tuple(speeds.tolist()), unsteadiness)


def speeds_of(profile: CostProfile, lines: Sequence[LogLine], began_at: float | None = None) -> tuple[float, ...]:
    """Return the speed of a live run, window by window from its first step or ``began_at``: measured over priced time.

    Prices are those of a mean step with the profile's noise, which a simulation multiplies by. One that is wrong about
    the workload counts as speed: nothing tells the two apart.
    """
    steps = [line for line in lines if isinstance(line, StepRecord)]
    loads = [line for line in lines if isinstance(line, LoadRecord)]
    windows = windows_of(np.array([one.launched_at for one in steps]), began_at)
    took = np.array([one.took_s for one in steps])
    return tuple(over_windows(windows, took, predict_times(profile, steps, loads)).tolist())


@dataclass(frozen=True, slots=True)
class OwnSpeed:
    """The speed of a live run, window by window; of an idle window, that of the last one.

    Args:
        numbers: Windows with steps, counted from the begin of the run.
        speeds: Measured over priced time in each of them.
        began_s: Begin of the run in virtual time.
    """

    numbers: NDArray[np.int64]
    speeds: Array
    began_s: float = 0.0

    @classmethod
    def of(cls, profile: CostProfile, lines: Sequence[LogLine], began_at: float) -> OwnSpeed:
        """Return the speed of a run by its log, whose clock stood at ``began_at`` when it began."""
        steps = [line for line in lines if isinstance(line, StepRecord)]
        at = np.array([one.launched_at - began_at for one in steps])
        return cls(np.unique((at // WINDOW_S).astype(np.int64)), np.array(speeds_of(profile, lines, began_at)))

    def factor(self, now: float) -> float:
        """Return the factor on a step that begins now."""
        place = int(np.searchsorted(self.numbers, (now - self.began_s) // WINDOW_S, side="right"))
        return float(self.speeds[max(0, place - 1)])


def windows_of(at: Array, began_at: float | None = None) -> NDArray[np.int64]:
    """Return the window of each step, numbered without gaps: an idle window has no speed."""
    began_at = at[0] if began_at is None else began_at
    numbers: NDArray[np.int64] = np.unique((at - began_at) // WINDOW_S, return_inverse=True)[1]
    return numbers


def over_windows(windows: NDArray[np.int64], measured: Array, priced: Array) -> Array:
    """Return measured over priced time in each window."""
    ratios: Array = np.bincount(windows, measured) / np.bincount(windows, priced)
    return ratios


def variation(values: Array) -> float:
    return float(values.std() / values.mean())


def engine_of(machine: Machine, folder: Path) -> SimulationConfig:
    """Return the simulated engine of the demo model on a calibrated machine, whose profile is written to a folder."""
    machine.profile.write(folder / "profile.json")
    setup = Setup(profile=str(folder / "profile.json"), scheduler=SCHEDULER, exact_caps=True)
    return make_config(setup, targets=WORKLOAD.adapters.targets)


class Predicted:
    """Simulated runs of an engine on a calibrated machine."""

    def __init__(self, machine: Machine, engine: SimulationConfig) -> None:
        self._engine = engine
        self._profile = structs.replace(machine.profile, speed_drift=None)
        self._speeds = machine.speeds

    def config(self, name: str, speeds: Sequence[float] | OwnSpeed) -> SimulationConfig:
        """Return the engine of one run on a machine of such speeds; its name seeds what is drawn.

        On a machine of a run's own speed a step takes its mean time, and nothing is drawn.
        """
        if isinstance(speeds, OwnSpeed):
            return replace(self._engine, cost=FittedCost(self._profile), speed=lambda _: speeds)
        cost = FittedCost(self._profile, Random(f"steps/{name}"))
        return replace(self._engine, cost=cost, speed=lambda _: DrawnSpeed(speeds, Random(f"speed/{name}")))

    def serve(self, workload: Workload, name: str, speeds: Sequence[float] | OwnSpeed) -> list[RequestRecord]:
        """Return the requests of a run in order of arrival."""
        return sorted(simulate(workload, self.config(name, speeds)).records, key=lambda one: int(one.request_id))

    def capacity(self, num_requests: int) -> float:
        """Return requests per second when all are there at once."""
        spec = replace(WORKLOAD, arrivals=PoissonArrivals(rate=1e6), num_requests=num_requests)
        rates = []
        for number in range(DRAWS):
            records = self.serve(make_workload(spec, number), f"capacity/{number}", self._speeds)
            rates.append(num_requests / max(one.finished_at for one in records))
        return float(np.mean(rates))


def seconds_of(records: Sequence[RequestRecord], what: str) -> Array:
    """Return the times of a run's requests that are counted, in seconds."""
    counted = records[int(len(records) * WARM_UP) :]
    if what == "first token":
        return np.array([one.ttft_s for one in counted if one.ttft_s is not None])
    return np.array([gap for one in counted for gap in one.gaps_s])


def interval(runs: Sequence[Array], percentile: float) -> list[float]:
    """Return a percentile of all runs together, and the ends of its interval by resampling runs."""
    rng = np.random.default_rng(0)
    drawn = [
        np.percentile(np.concatenate([runs[place] for place in rng.integers(len(runs), size=len(runs))]), percentile)
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return [float(np.percentile(np.concatenate(runs), percentile)), float(low), float(high)]


Runs = Mapping[float, Sequence[Sequence[RequestRecord]]]
"""The requests of each run, by load."""


def compared(live: Runs, predicted: Mapping[str, Runs]) -> list[dict[str, Any]]:
    """Return live and predicted percentiles by load, each with its interval."""
    rows = []
    for load in LOADS:
        for what, percentile in FIGURES:
            measured = interval([seconds_of(run, what) for run in live[load]], percentile)
            sides = {}
            for known, of in predicted.items():
                found = interval([seconds_of(run, what) for run in of[load]], percentile)
                does_overlap = measured[1] <= found[2] and found[1] <= measured[2]
                sides[known] = {"s": found, "overlap": does_overlap}
            rows.append({"load": load, "figure": f"{what}, P{percentile}", "live_s": measured, "predicted": sides})
    return rows


def kept_up_to(live: Runs, predicted: Runs) -> tuple[float, float | None]:
    """Return the P90 of the first token that is predicted for ``PLANNED``, and the load up to which it is kept live."""

    def p90(runs: Sequence[Sequence[RequestRecord]]) -> float:
        return float(np.percentile(np.concatenate([seconds_of(run, "first token") for run in runs]), 90))

    limit_s = p90(predicted[PLANNED])
    return limit_s, crossing([(load, p90(live[load])) for load in LOADS], limit_s)


def in_ms(seconds: Sequence[float]) -> str:
    middle, low, high = (1e3 * one for one in seconds)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def verdict(limit_s: float, kept: float | None) -> str:
    if kept is None:
        return f"{1e3 * limit_s:.0f} ms, which the live engine keeps outside the loads that were served"
    return f"{1e3 * limit_s:.0f} ms, which the live engine keeps up to {kept:.1%}: off by {PLANNED / kept - 1:+.1%}"


def page(figures: Mapping[str, Any]) -> str:
    rows = []
    for one in figures["compared"]:
        row = [f"{one['load']:.0%}", one["figure"], in_ms(one["live_s"])]
        for known in KNOWLEDGE:
            found = one["predicted"][known]
            error = found["s"][0] / one["live_s"][0] - 1
            row += [in_ms(found["s"]), f"{error:+.0%}", "yes" if found["overlap"] else "no"]
        rows.append(row)
    speeds, of_runs, unsteady = figures["speeds"], figures["speeds_of_runs"], figures["unsteadiness"]
    low = [one["predicted"] for one in figures["compared"] if one["load"] <= PLANNED]
    overlaps = {known: sum(one[known]["overlap"] for one in low) for known in KNOWLEDGE}
    header = ["load", "figure", "live"]
    for known in KNOWLEDGE:
        header += [f"predicted {known}", "error", "overlap"]
    lines = [
        "# Live and predicted, by load",
        "",
        f"`{figures['command']}` on {figures['machine']}, one thread for the model: the demo model, {NUM_ADAPTERS} "
        f"adapters, {figures['requests']} requests a run, {figures['rounds']} live runs and "
        f"{figures['rounds'] * DRAWS} predicted ones at each load; 100 % are {figures['capacity_per_s']:.2f} requests "
        f"a second. Other processes took {figures['busy_share']:.1%} of the machine's processor time.",
        "",
        f"*Once* knows a sweep before the first run. Its steps vary about their price by {unsteady['wall']:.0%} in "
        f"wall time and by {unsteady['processor']:.0%} in processor time; over windows of {WINDOW_S:g} s they took "
        f"between {min(speeds):.2f} and {max(speeds):.2f} times their price, {np.mean(speeds):.2f} on average. *So "
        "far* also knows the speed of the live runs before the one that is predicted, and with it how wrong the "
        "sweep's prices are about their steps. Run by run, these took between "
        f"{min(of_runs):.2f} and {max(of_runs):.2f} times their price, {np.mean(of_runs):.2f} on average.",
        "",
        "Milliseconds, with 95 % intervals over runs.",
        "",
        *table(header, rows, left=2),
        "",
        f"Up to {PLANNED:.0%} of load the intervals overlap in {overlaps['once']} of {len(low)} figures with what is "
        f"known once, and in {overlaps['so far']} with what is known so far.",
        "",
        f"P90 of the first token that is predicted once, for {PLANNED:.0%} of load: {verdict(*figures['kept_up_to'])}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="two minutes, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20.0, help="of live runs, altogether")
    parser.add_argument("--sweep", type=float, default=150.0, help="seconds of calibration")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.minutes, options.sweep = 1, 1.0, 20.0
    torch.set_num_threads(1)
    others = Others()
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu"),
        memory=MEMORY,
        scheduler=SCHEDULER,
        adapters=AdapterConfig(),
    )
    machine = calibrate(config, options.sweep)
    with tempfile.TemporaryDirectory(prefix="forecast-") as name:
        simulator = Predicted(machine, engine_of(machine, Path(name)))
        capacity = simulator.capacity(200)
        num_requests = int(options.minutes * 60 * capacity / options.rounds / sum(1 / load for load in LOADS))
        print(f"{capacity:.2f} requests a second; {num_requests} in a run", flush=True)
        log: list[LogLine] = []
        live: dict[float, list[list[RequestRecord]]] = {load: [] for load in LOADS}
        predicted: dict[str, dict[float, list[list[RequestRecord]]]] = {
            known: {load: [] for load in LOADS} for known in KNOWLEDGE
        }
        known_speeds = dict.fromkeys(KNOWLEDGE, machine.speeds)
        speeds_of_runs: list[float] = []
        engine = Live(config, make_workload(replace(WORKLOAD, num_requests=30), 99), Path(name), log.append)
        try:
            engine.serve(make_workload(replace(at_rate(WORKLOAD, 0.5 * capacity), num_requests=30), 99))  # warm up
            for number, shown in in_turns([str(load) for load in LOADS], options.rounds, num_warm_up=0):
                load = float(shown)
                spec = replace(at_rate(WORKLOAD, load * capacity), num_requests=num_requests)
                workload = make_workload(spec, number)
                log.clear()
                live[load].append(engine.serve(workload))
                for known, draw in product(KNOWLEDGE, range(DRAWS)):
                    run = simulator.serve(workload, f"{load}/{number}/{draw}", known_speeds[known])
                    predicted[known][load].append(run)
                found = speeds_of(machine.profile, log)
                known_speeds["so far"] += found  # from the next run on
                speeds_of_runs.append(float(np.mean(found)))
                print(f"round {number + 1}: {load:.0%} served, {speeds_of_runs[-1]:.2f} times its price", flush=True)
        finally:
            engine.close()
    figures = {
        "command": "python bench/forecast.py",
        "machine": describe_machine(torch.device("cpu")),
        "busy_share": others.share(),
        "rounds": options.rounds,
        "requests": num_requests,
        "capacity_per_s": capacity,
        "unsteadiness": machine.unsteadiness,
        "speeds": machine.speeds,
        "fit": [{"regime": one.regime, "median_error": one.median_error} for one in machine.profile.errors],
        "speeds_of_runs": speeds_of_runs,
        "compared": compared(live, predicted),
        "kept_up_to": kept_up_to(live, predicted["once"]),
    }
    refused = reason_to_refuse(options.rounds, figures["busy_share"])
    publish("forecast", figures, page(figures), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
