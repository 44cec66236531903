"""The systems of the forecast on traces (``forecast_traces.py``), their simulations, and the figures of a run."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from forecast import Machine, OwnSpeed, Predicted, seconds_of, speeds_of
from live import VOCABULARY, http_arrivals
from planner_live import SCHEDULER, WORKLOAD
from ratios import ratio_by_round

from manylora.core.costs.step_log import LogLine
from manylora.lab.bench.load import run_load
from manylora.lab.bench.target import Target
from manylora.lab.measure import RequestRecord
from manylora.lab.measure.summary import gaps_of
from manylora.lab.planning.load_test import at_rate
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import Workload, make_workload

__all__ = [
    "GOALS",
    "HARDWARE",
    "MODEL",
    "NUM_DEVICES",
    "OWN",
    "ROUTER",
    "SYNTHETIC",
    "Devices",
    "Priced",
    "System",
    "at_load",
    "figures_of",
    "middle",
]

GOALS = {"throughput": 0.03, "first token, P50": 0.10, "first token, P99": 0.20}
"""Figures, and the largest error of a prediction that is good enough."""

ONCE, BEFORE, OWN = "once", "just before", "its own speed"
SYNTHETIC = make_workload(replace(at_rate(WORKLOAD, 1.0), num_requests=200), 99)
DRAWS = 7
"""Simulated runs beside a live one, where the machine's speed is drawn."""

LOOK_LOAD = 0.7
"""Load of the drawn requests that tell the speed of the moment."""

NUM_DEVICES, HARDWARE, MODEL = 2, "a40", "llama-7b"
ROUTER = "least-loaded"
"""Of the server and its simulation: where an adapter was before decides nothing."""

Records = list[RequestRecord]


def at_load(workload: Workload, busy_s: float, load: float) -> Workload:
    """Return a workload with its gaps scaled, so that it would keep the system busy for a share of its time."""
    factor = busy_s / load / workload.duration_s
    return replace(
        workload, requests=tuple(replace(one, arrival_s=factor * one.arrival_s) for one in workload.requests)
    )


def took_s(run: Records) -> float:
    """Return the time from the first arrival to the last token."""
    return max(one.finished_at for one in run) - min(one.arrived_at for one in run)


def figures_of(run: Records) -> dict[str, float]:
    """Return tokens a second, from the first arrival to the last token, and percentiles of first tokens in seconds."""
    first_s = seconds_of(run, "first token")
    return {
        "throughput": sum(one.num_output_tokens for one in run) / took_s(run),
        **{f"first token, P{percentile}": float(np.percentile(first_s, percentile)) for percentile in (50, 99)},
    }


def middle(runs: Sequence[Records]) -> dict[str, float]:
    """Return the median of each figure over runs."""
    figures = [figures_of(run) for run in runs]
    return {name: statistics.median(one[name] for one in figures) for name in GOALS}


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


class Engine(Protocol):
    """An engine that serves a workload on the wall clock, and returns its requests in order of arrival."""

    def serve(self, workload: Workload) -> Records:
        """Serve it to its end."""
        ...


class Priced:
    """An engine on this processor, and its simulation by the prices of a sweep and the speed of the machine.

    Args:
        name: In words.
        engine: Writes ``log`` while it serves.
        look_s: Seconds of drawn requests that tell the speed of the moment.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        log: list[LogLine],
        machine: Machine,
        simulator: Predicted,
        *,
        look_s: float,
    ) -> None:
        self._name, self._engine, self._log = name, engine, log
        self._machine, self._simulator, self._look_s = machine, simulator, look_s
        self._before: Sequence[float] = machine.speeds
        self._own: OwnSpeed | None = None
        self._times_price: dict[str, list[float]] = {"synthetic": [], "live": []}
        self._synthetic_s = self.busy_s(SYNTHETIC)
        self._engine.serve(at_load(SYNTHETIC, self._synthetic_s, 0.5))  # warm up

    def about(self) -> str:
        """Return the system, and the time of steps over their price, run by run."""
        ratios = ratio_by_round(self._times_price["live"], self._times_price["synthetic"])
        times = {name: statistics.median(one) for name, one in self._times_price.items()}
        return (
            f"{self._name} on this processor, one thread. Steps of drawn requests just before a run took "
            f"{times['synthetic']:.2f} times the sweep's price, those of the run {times['live']:.2f}: "
            f"a ratio of {ratios}"
        )

    def busy_s(self, workload: Workload) -> float:
        """Return the mean over simulated runs."""
        at_once = replace(workload, requests=tuple(replace(one, arrival_s=0.0) for one in workload.requests))
        runs = [self._simulator.serve(at_once, f"busy/{draw}", self._machine.speeds) for draw in range(DRAWS)]
        return statistics.mean(took_s(run) for run in runs)

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
        _, records = self._serve(workload, "live")
        began_at = records[0].arrived_at - workload.requests[0].arrival_s
        self._own = OwnSpeed.of(self._machine.profile, self._log, began_at)
        return records

    def predicted(self, workload: Workload, name: str) -> dict[str, list[Records]]:
        """Return runs on a machine of drawn speeds, and one at the live run's own."""
        speeds = {ONCE: self._machine.speeds, BEFORE: self._before}
        runs = {
            known: [self._simulator.serve(workload, f"{name}/{draw}", one) for draw in range(DRAWS)]
            for known, one in speeds.items()
        }
        assert self._own is not None, "the live run comes first"
        return runs | {OWN: [self._simulator.serve(workload, name, self._own)]}


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
