"""What each column of the parity table may know of the machine: from mean prices to how slow it was at every moment.

A simulation errs because its prices are wrong, because the machine was slower or faster than when they were measured,
or because it decides otherwise. Columns take these apart by what they know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from manylora.core.costs.step_log import LoadRecord, LogHeader, LogLine, StepRecord
from manylora.core.plan import AdapterLoad, PlannedSequence, StepPlan
from manylora.core.types import SampledToken
from manylora.lab.costs.calibrate import fit_profile, predict_times, regime_of
from manylora.lab.costs.fitted import FittedCost, MachineSpeed
from manylora.lab.costs.profile import CostProfile
from manylora.lab.measure.plots import new_figure
from manylora.lab.sim.run.executor import SimulatedExecutor, SimulatedWork

WINDOW_S = 2.0
"""How finely the speed of the machine is told."""

FOLD_S = 5.0
"""Alternating stretches of the live run, each priced by the others."""

COLUMNS = {
    "mean prices": "what steps cost on the mean of the two sweeps",
    "jitter": "and how single steps lie about it, drawn one by one",
    "drift": "and the size and time constant of the drift in the sweeps: what `manylora simulate` draws",
    "same minutes": "what steps cost on the mean of the live run itself, a step's price from alternating stretches of "
    f"{FOLD_S:g} s that it is no part of: drift between sweeps and run is out",
    "speed replayed": "prices of the sweeps, and how slow the live run was around each moment, over "
    f"{WINDOW_S:g} s: what is left is the simulator's own error, and chance within the window",
}
"""Columns, and what each knows beside arrivals."""

WITHOUT_CHANCE = ("mean prices", "same minutes")

Array = NDArray[np.float64]
Curve = tuple[Array, Array]
Choose = Callable[[PlannedSequence], SampledToken]


class Speed:
    """How slow the machine was around a moment of a log: measured over predicted time, over a window about it.

    Args:
        at: Middles of the steps, in seconds, rising.
        took: Their durations.
        predicted: Their predicted durations.
        window_s: Width of the window.
    """

    def __init__(self, at: Array, took: Array, predicted: Array, window_s: float = WINDOW_S) -> None:
        self._at, self._took, self._predicted = at, took, predicted
        self._window_s = window_s
        self._sums = [np.concatenate([[0.0], np.cumsum(one)]) for one in (took, predicted)]

    def factor(self, now: float) -> float:
        """Return measured over predicted around now; that of the next step where there was none."""
        return float(self._around(np.array([now]))[0])

    def curve(self) -> Curve:
        """Return the speed over time, from 0 on."""
        return self._at - self._at[0], self._around(self._at)

    def of_others(self) -> Array:
        """Return for each step the speed that the other steps of its window show, itself left out."""
        return self._around(self._at, without=(self._took, self._predicted))

    def _around(self, at: Array, without: Sequence[Array] = (0.0, 0.0)) -> Array:  # type: ignore[assignment]
        half_s = self._window_s / 2
        first = np.searchsorted(self._at, at - half_s)
        last = np.searchsorted(self._at, at + half_s, side="right")
        nearest = np.minimum(first, len(self._at) - 1)
        measured, predicted = (total[last] - total[first] - one for total, one in zip(self._sums, without, strict=True))
        is_told = predicted > 1e-9
        return np.where(
            is_told,
            measured / np.where(is_told, predicted, 1.0),
            self._took[nearest] / self._predicted[nearest],
        )


class OtherFold:
    """Prices steps by a profile that was fitted to the other half of a run: it is told the time by its executor.

    Args:
        costs: By the steps outside each of the two folds.
        start_s: When the run began.
    """

    def __init__(self, costs: Sequence[FittedCost], start_s: float) -> None:
        self._costs = costs
        self._start_s = start_s
        self.now = start_s

    @property
    def interference(self) -> dict[Any, float]:
        return self._costs[0].interference

    def step_time_s(self, plan: StepPlan) -> float:
        return self._costs[fold_of(self.now - self._start_s)].step_time_s(plan)

    def load_time_s(self, load: AdapterLoad) -> float:
        return self._costs[fold_of(self.now - self._start_s)].load_time_s(load)


class ToldExecutor(SimulatedExecutor):
    """Tells the cost model the time."""

    def __init__(self, cost: OtherFold, **others: Any) -> None:
        super().__init__(cost, **others)
        self._told = cost

    def launch(self, plan: StepPlan, now: float) -> SimulatedWork:
        self._told.now = now
        return super().launch(plan, now)


def fold_of(elapsed_s: float) -> int:
    return int(elapsed_s // FOLD_S) % 2


def profiles_of_folds(lines: Sequence[LogLine], start_s: float) -> tuple[CostProfile, CostProfile]:
    """Fit one profile to the steps outside each fold; loads, of which there are few, are in both."""

    def outside(fold: int) -> list[LogLine]:
        return [
            line for line in lines if not isinstance(line, StepRecord) or fold_of(line.launched_at - start_s) != fold
        ]

    return fit_profile(outside(0)), fit_profile(outside(1))


def steps_of(lines: Sequence[LogLine]) -> tuple[list[StepRecord], Array, Array]:
    """Return the steps of one run, their middles and what they took."""
    steps = [line for line in lines if isinstance(line, StepRecord)]
    at = np.array([(step.launched_at + step.ended_at) / 2 for step in steps])
    return steps, at, np.array([step.took_s for step in steps])


def speed_of(profile: CostProfile, lines: Sequence[LogLine], window_s: float = WINDOW_S) -> Speed:
    """Return how slow the machine was in a run, beside what a profile says."""
    steps, at, took = steps_of(lines)
    return Speed(at, took, predict_times(profile, steps, loads_of(lines)), window_s)


def loads_of(lines: Sequence[LogLine]) -> list[LoadRecord]:
    return [line for line in lines if isinstance(line, LoadRecord)]


class Columns:
    """Executors of every column.

    Args:
        profile: Fitted to the sweeps.
        live: The log of the live run, its header first.
        start_s: When the live run began, which is 0 in simulations.
        vocab_size: For synthetic tokens.
        choose: Makes them.
    """

    def __init__(
        self, profile: CostProfile, live: Sequence[LogLine], start_s: float, *, vocab_size: int, choose: Choose
    ) -> None:
        self._profile = profile
        self._made: dict[str, Any] = {"vocab_size": vocab_size, "choose": choose}
        self._live = [moved(line, -start_s) for line in live]
        self.whole = fit_profile(self._live)
        self.folds = profiles_of_folds(self._live, 0.0)
        self.speed = speed_of(profile, self._live)

    def executor(self, column: str, seed: int) -> SimulatedExecutor:
        rng = Random(seed)
        if column == "mean prices":
            return self._make(FittedCost(self._profile), None)
        if column == "jitter":
            return self._make(FittedCost(structs.replace(self._profile, speed_drift=None), rng), None)
        cost = FittedCost(self._profile, rng)
        if column == "drift":
            return self._make(cost, cost.speed())
        if column == "speed replayed":
            return self._make(cost, self.speed)
        assert column == "same minutes", column
        folds = OtherFold([FittedCost(one) for one in self.folds], 0.0)
        return ToldExecutor(folds, interference=folds.interference, **self._made)

    def _make(self, cost: FittedCost, speed: MachineSpeed | None) -> SimulatedExecutor:
        return SimulatedExecutor(cost, interference=cost.interference, speed=speed, **self._made)

    def step_errors(self) -> dict[str, dict[str, float]]:
        """Hold prices against the steps of the live run, by kind: from sweeps and from other folds, raw and even.

        *Even* is with the machine's speed taken out, as the other steps of the window show it.
        """
        steps, at, took = steps_of(self._live)
        loads = loads_of(self._live)
        by_fold = [predict_times(one, steps, loads) for one in self.folds]
        folds = np.array([fold_of(step.launched_at) for step in steps])
        priced = {"sweeps": predict_times(self._profile, steps, loads), "folds": np.where(folds == 0, *by_fold)}
        regimes = np.array([regime_of(step.features) for step in steps])
        speeds = {name: Speed(at, took, one).of_others() for name, one in priced.items()}
        out = {}
        for kind in ("decode", "prefill", "mixed", "all"):
            of = regimes == kind if kind != "all" else np.ones(len(steps), dtype=bool)
            if of.sum() < 2:
                continue
            predicted = priced["sweeps"]
            errors = np.abs(predicted[of] / took[of] - 1)
            out[kind] = {
                "steps": int(of.sum()),
                "predicted_over_measured": float(predicted[of].sum() / took[of].sum()),
                "median_error": float(np.median(errors)),
                "p90_error": float(np.quantile(errors, 0.9)),
            }
            for name, one in priced.items():
                out[kind][f"r2_{name}"] = explained(took[of], one[of])
                out[kind][f"r2_{name}_even"] = explained((took / speeds[name])[of], one[of])
        return out


def moved(line: LogLine, by_s: float) -> LogLine:
    if isinstance(line, LogHeader):
        return line
    return msgspec.structs.replace(line, launched_at=line.launched_at + by_s, ended_at=line.ended_at + by_s)


def explained(measured: Array, predicted: Array) -> float:
    """Return R²."""
    variance = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((predicted - measured) ** 2).sum()) / variance if variance else math.nan


def plot_speed(runs: dict[str, Curve], path: Path) -> Path:
    """Draw how slow the machine was over time, a curve for each run."""
    figure, (axes,) = new_figure((10.0, 3.0))
    for label, (at, factors) in runs.items():
        axes.plot(at, factors, label=label, linewidth=1.0)
    axes.axhline(1.0, color="#888888", linewidth=0.5)
    axes.set(xlabel="seconds", ylabel="measured / predicted", title=f"how slow the machine was, over {WINDOW_S:g} s")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    return path
