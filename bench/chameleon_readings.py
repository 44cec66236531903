"""Where Chameleon's figures 11 to 13 lie among the readings of its text: a grid of all that it leaves open, jointly.

Four things decide the result, and the publication states none of them:

* the *factor* on the trace's lengths. "SLO = 5 s" gives 0.173; lengths whose peak fills the memory need more;
* the *link*: the bandwidth of copies to the device. Figure 2 implies 8.75 GB/s;
* the *prefetch* of the baseline: off, as in S-LoRA's public code by default; beside the fifth and seventh decode step,
  as with its option; or whenever the link is idle;
* *admission*: every tenth step, as in S-LoRA's code, or every step, as Chameleon's section 4.1 says, for both systems
  or for Chameleon alone.

Every combination is a reading of equal rank. Runs of both systems are paired by seed; intervals are Student's, 95 %.
What would add nothing is left out, for reasons that were given before the first run:

* Factors of 0.27 and more are not crossed with the slowest link: S-LoRA's capacity is about the published one at
  figure 2's link already, and a slower link only lowers it.
* On figure 2's link a baseline that prefetches whenever the link is idle hides its loads; that is run at 0.173 alone.
* Beside the loads of the published changes only those are run that enclose the load served within the SLO, 2 req/s
  apart at most.

Results are the same on every machine. ``--cases`` keeps the runs, so that a stopped grid goes on where it was; give
each state of the code a folder of its own. ``--kept`` then reports what has been run so far.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from chameleon_readings_picture import draw
from publishing import RESULTS, arguments, publish, table

from manylora.lab.experiments.cases import cases_of
from manylora.lab.experiments.findings import Verdict, compare, crossing
from manylora.lab.experiments.read import read_experiment
from manylora.lab.experiments.result import Result
from manylora.lab.experiments.running import Runner
from manylora.lab.experiments.spec import Claim, Experiment, Point, Table
from manylora.lab.measure import Estimate, interval_of_runs

FIGURE_2 = 0.35
"""The share of the card's link that S-LoRA's copies reach by figure 2."""

LINK_GB_S = {FIGURE_2: "8.75", 0.1: "2.5", 0.035: "0.875"}
"""Bandwidths, by their share of the 25 GB/s of the card's link."""

GRID = (
    (0.27, FIGURE_2),
    (0.2, 0.035),
    (0.173, FIGURE_2),
    (0.3, FIGURE_2),
    (0.173, 0.1),
    (0.27, 0.1),
    (0.3, 0.1),
    (0.173, 0.035),
    (0.2, 0.1),
    (0.2, FIGURE_2),
)
"""Factors and links; the first lines matter most."""

READINGS: Mapping[str, tuple[str, str]] = {
    "10th step, no prefetch": ("s-lora-no-prefetch", "chameleon"),
    "10th step, steps 5 and 7": ("s-lora-prefetch", "chameleon"),
    "10th step, idle link": ("s-lora", "chameleon"),
    "each step, no prefetch": ("s-lora-each-step-no-prefetch", "chameleon-each-step"),
    "each step, idle link": ("s-lora-each-step", "chameleon-each-step"),
    "Chameleon each step, no prefetch": ("s-lora-no-prefetch", "chameleon-each-step"),
    "Chameleon each step, steps 5 and 7": ("s-lora-prefetch", "chameleon-each-step"),
    "Chameleon each step, idle link": ("s-lora", "chameleon-each-step"),
}
"""Admission and the baseline's prefetch, as the setups of both systems."""

CHANGES = {6: (-0.147, -0.139), 8: (-0.246, -0.209), 9: (-0.807, -0.481)}
"""Published changes of the P99 and of the P50 of the time to first token, by load in requests per second."""

LEAST_LOAD, MOST_LOAD, APART = 3, 20, 2
"""Bounds of the search for a capacity, and how far apart two loads around it may be, in requests per second."""

LIMIT_S = 5.0

SHOWN = ("ttft_p50", "ttft_p99", "tbt_p99", "tpot_p99", "hit_rate", "link_busy", "adapter_wait_p99")

Runs = dict[int, Sequence[Result]]
"""The runs of one setup by load: one for each seed."""


def _change(place: int, figure: str, load: int) -> Claim:
    published = CHANGES[load][place]
    return Claim(
        text=f"{figure} at {load}", figure=figure, form="change", published=published, tolerance=0.05, unit="%"
    )


CLAIMS = {
    **{f"P99 at {load}": _change(0, "ttft_p99", load) for load in CHANGES},
    **{f"P50 at {load}": _change(1, "ttft_p50", load) for load in CHANGES},
    "S-LoRA's capacity": Claim(text="", figure="ttft_p99", form="crossing", published=8.6, tolerance=0.9),
    "Chameleon's capacity": Claim(text="", figure="ttft_p99", form="crossing", published=12.9, tolerance=1.3),
    "their ratio": Claim(text="", figure="ttft_p99", form="crossing-ratio", published=1.5, tolerance=0.1),
}


@dataclass(frozen=True)
class Cell:
    """One factor and one link."""

    factor: float
    link_share: float

    @property
    def name(self) -> str:
        return f"{self.factor:g}, {LINK_GB_S[self.link_share]} GB/s"

    @property
    def readings(self) -> dict[str, tuple[str, str]]:
        """Readings that may differ here from others."""
        is_hidden = self.link_share == FIGURE_2 and self.factor != 0.173
        return {name: setups for name, setups in READINGS.items() if not (is_hidden and name.endswith("idle link"))}

    @property
    def setups(self) -> list[str]:
        """Setups of these readings."""
        return list(dict.fromkeys(setup for setups in self.readings.values() for setup in setups))

    def experiment(self, base: Experiment, setup: str, load: int) -> Experiment:
        """Return one setup at one load as an experiment."""
        changes: Table = {"workload.lengths.scale": self.factor, "workload.arrivals.rate": load}
        if self.link_share != FIGURE_2:  # the setups' own, so that other experiments share the runs
            changes["setup.link_share"] = self.link_share
        point = Point(f"{load}", float(load), changes)
        return replace(base, setups={setup: base.setups[setup]}, points=(point,), claims=())


class NotRunError(Exception):
    """A run is not kept, and only kept ones are asked for."""


@dataclass(frozen=True)
class Simulated:
    """Runs cases, each once.

    Args:
        base: The experiment with the setups and the workload.
        runner: Runs what it has not kept.
        traces: Folder of public traces.
        num_seeds: Runs of each case.
        duration_s: Cuts workloads off, for a quick look.
        kept: Folder of runs to report without running others; ``None`` to run all.
    """

    base: Experiment
    runner: Runner
    traces: Path
    num_seeds: int
    duration_s: float | None
    kept: Path | None = None

    def run(self, cell: Cell, setup: str, load: int) -> list[Result]:
        """Return the results of a setup at a load, by seed."""
        sys.stderr.write(f"\r{setup} at {load} req/s".ljust(60))
        sys.stderr.flush()
        experiment = cell.experiment(self.base, setup, load)
        cases = cases_of(experiment, seeds=self.num_seeds, traces=self.traces, duration_s=self.duration_s).values()
        if self.kept is not None and not all((self.kept / f"{case.key}.json").is_file() for case in cases):
            raise NotRunError
        results = self.runner.run(cases)
        return [results[case.key] for case in cases]


def run_setup(run: Callable[[int], Sequence[Result]]) -> Runs:
    """Run a setup at the loads of the published changes, and at those that enclose its capacity in every seed."""
    runs: Runs = {load: run(load) for load in CHANGES}
    while (load := next_load({at: tails_s(found) for at, found in runs.items()})) is not None:
        runs[load] = run(load)
    return dict(sorted(runs.items()))


def tails_s(found: Sequence[Result]) -> list[float]:
    """Return the P99 of the time to first token of each seed, in seconds."""
    return [one.figures["ttft_p99"] for one in found]


def next_load(tails: Mapping[int, Sequence[float]]) -> int | None:
    """Return the load to run next; ``None`` once neighbouring loads enclose the limit in every seed.

    Args:
        tails: P99 of the time to first token by load, one for each seed, in seconds.
    """
    loads = sorted(tails)
    for seed in range(len(tails[loads[0]])):
        beyond = [place for place, load in enumerate(loads) if tails[load][seed] > LIMIT_S]
        if not beyond and loads[-1] < MOST_LOAD:
            return min(MOST_LOAD, loads[-1] + APART)
        if beyond and beyond[0] == 0 and loads[0] > LEAST_LOAD:
            return loads[0] - 1
        if beyond and beyond[0] > 0 and loads[beyond[0]] - loads[beyond[0] - 1] > APART:
            return (loads[beyond[0]] + loads[beyond[0] - 1]) // 2
    return None


def figures_of(cell: Cell, results: Mapping[str, Runs]) -> dict[str, Any]:
    """Return the figures of a cell: the comparisons of each reading, and what its runs were like."""
    return {
        "factor": cell.factor,
        "link_gb_s": LINK_GB_S[cell.link_share],
        "readings": {
            reading: dict(compared(results[s_lora], results[chameleon]))
            for reading, (s_lora, chameleon) in cell.readings.items()
            if s_lora in results and chameleon in results
        },
        "runs": {setup: {load: shown_of(found) for load, found in runs.items()} for setup, runs in results.items()},
    }


def shown_of(found: Sequence[Result]) -> dict[str, float]:
    means = {name: interval_of_runs([run.figures[name] for run in found]).middle for name in SHOWN}
    return means | {"kv_share": kv_share(found).middle}


def compared(s_lora: Runs, chameleon: Runs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each published figure by name, with ours and the verdict."""
    capacities = [list(capacities_of(one)) for one in (s_lora, chameleon)]
    for name, claim in CLAIMS.items():
        values: list[float | None]
        if claim.form == "change":
            load = int(name.rpartition(" ")[2])
            pairs = zip(chameleon[load], s_lora[load], strict=True)
            values = [one.figures[claim.figure] / other.figures[claim.figure] - 1.0 for one, other in pairs]
        elif claim.form == "crossing":
            values = capacities[0] if name.startswith("S-LoRA") else capacities[1]
        else:
            pairs_of = zip(*capacities, strict=True)
            values = [None if None in (other, one) else one / other for other, one in pairs_of]
        found = compare(claim, values)
        yield (
            name,
            {
                "published": claim.published,
                "ours": None if found.ours is None else [found.ours.middle, found.ours.low, found.ours.high],
                "verdict": found.verdict.value,
            },
        )


def capacities_of(runs: Runs) -> Iterator[float | None]:
    """Yield the load that each seed serves within the SLO; ``None`` where it is outside the loads of the search."""
    for tails in zip(*map(tails_s, runs.values()), strict=True):
        yield crossing(list(zip(runs, tails, strict=True)), LIMIT_S)


def kv_share(runs: Sequence[Result]) -> Estimate:
    """Return the peak of KV as a share of all memory but the weights."""
    shares = []
    for run in runs:
        curves = {name: np.asarray(run.curves[f"memory_{name}"].y) for name in ("weights", "kv", "all")}
        shares.append(float(np.max((curves["kv"] - curves["weights"]) / (curves["all"] - curves["weights"]))))
    return interval_of_runs(shares)


def shown(row: Mapping[str, Any]) -> str:
    """Return a number beside its interval; bold where it agrees, "-" where it lies outside the loads of the search."""
    if row["ours"] is None:
        return "-"
    middle, low, high = row["ours"]
    if abs(row["published"]) < 1.0:
        text = f"{middle * 100:+.0f} ({low * 100:+.0f} to {high * 100:+.0f})"
    else:
        text = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return f"**{text}**" if row["verdict"] == Verdict.AGREES.value else text


def report(cells: Sequence[dict[str, Any]], num_seeds: int) -> str:
    """Return the grid as Markdown."""
    heads = ["reading", *CLAIMS, "agree"]
    num_run = sum(len(cell["readings"]) for cell in cells)
    num_all = sum(len(Cell(*one).readings) for one in GRID)
    published = ["*published*"]
    published += [f"{100 * v[p]:+.1f} %" for p in (0, 1) for v in CHANGES.values()]
    published += ["8.6", "12.9", "1.5", ""]
    lines = [
        "# Chameleon's figures 11 to 13 among the readings of its text",
        "",
        "Changes of the time to first token, Chameleon against S-LoRA, in per cent, and the loads (req/s) at which the",
        f"P99 exceeds 5 s. Mean and 95 % interval over {num_seeds} paired seeds. **Bold** agrees with the publication:",
        f"within 5 points, 0.9 and 1.3 req/s, and 0.1. A dash: not between {LEAST_LOAD} and {MOST_LOAD} req/s in every "
        "seed.",
        "",
        f"All {num_all} readings of the grid."
        if num_run == num_all
        else f"{num_run} of {num_all} readings were run; the others are not shown.",
        "",
        "![grid](chameleon_readings.png)",
    ]
    for cell in cells:
        at = cell["runs"]["s-lora-no-prefetch"]
        last = max(cell["runs"]["chameleon"], key=int)
        memory = ", ".join(f"{at[load]['kv_share']:.0%} at {load} req/s" for load in CHANGES)
        beyond = f"{cell['runs']['chameleon'][last]['kv_share']:.0%} with Chameleon at {last}"
        lines += ["", f"## Factor {cell['factor']:g}, {cell['link_gb_s']} GB/s", ""]
        lines += [f"KV at its peak, of all memory but the weights: {memory}; {beyond}.", ""]
        rows = [published]
        for reading, found in cell["readings"].items():
            agree = sum(one["verdict"] == Verdict.AGREES.value for one in found.values())
            rows.append([reading, *(shown(found[name]) for name in CLAIMS), f"{agree} of {len(CLAIMS)}"])
        lines += table(heads, rows)
    lines += ["", "## Time between tokens", "", "P99 at 9 req/s, in ms: of all gaps, and of the means of requests.", ""]
    systems = list(dict.fromkeys(setup for setups in READINGS.values() for setup in setups))
    rows = []
    for cell in cells:
        at_9 = [cell["runs"][one][9] if one in cell["runs"] else None for one in systems]
        found_ms = ("-" if one is None else f"{1e3 * one['tbt_p99']:.0f}, {1e3 * one['tpot_p99']:.0f}" for one in at_9)
        rows.append([f"{cell['factor']:g}, {cell['link_gb_s']} GB/s", *found_ms])
    return "\n".join([*lines, *table(["cell", *systems], rows)])


def main() -> None:
    """Run the grid."""
    parser = arguments(__doc__, quick="one cell, one seed, a minute of arrivals")
    parser.add_argument("--traces", type=Path, required=True, help="folder of public traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case")
    parser.add_argument("--processes", type=int, default=1, help="parallel runs")
    parser.add_argument("--cases", type=Path, help="folder that keeps the runs")
    parser.add_argument("--cells", type=int, default=len(GRID), help="the first cells of the grid alone")
    parser.add_argument("--kept", action="store_true", help="run nothing: report the readings whose runs are all kept")
    options = parser.parse_args()
    if options.kept and options.cases is None:
        parser.error("Got --kept without --cases, the folder that keeps the runs")
    base = read_experiment("chameleon/readings")
    grid = [Cell(*one) for one in GRID[: options.cells]]
    duration_s = None
    if options.quick:
        grid, options.seeds, duration_s = [Cell(0.27, FIGURE_2)], 1, 60.0
    runs = Simulated(
        base,
        Runner(options.cases, num_processes=options.processes),
        options.traces,
        options.seeds,
        duration_s,
        options.cases if options.kept else None,
    )
    cells = []
    for place, cell in enumerate(grid, 1):
        sys.stderr.write(f"\n{place} of {len(grid)}: {cell.name}\n")
        results: dict[str, Runs] = {}
        for setup in cell.setups:
            with suppress(NotRunError):
                results[setup] = run_setup(partial(runs.run, cell, setup))
        figures = figures_of(cell, results)
        if figures["readings"]:
            cells.append(figures)
    sys.stderr.write("\n")
    if not options.quick:
        draw(cells, CLAIMS, list(READINGS), RESULTS / "chameleon_readings.png")
    publish(
        "chameleon_readings",
        {"seeds": options.seeds, "cells": cells},
        report(cells, options.seeds),
        is_kept=not options.quick,
    )


if __name__ == "__main__":
    main()
