"""Where Chameleon's figures 11 and 13 lie among the readings of its text: a grid of all that it leaves open, jointly.

Four things decide the result, and the publication states none of them:

* the *factor* on the trace's lengths. "SLO = 5 s" gives 0.173; lengths whose peak fills the memory need more;
* the *link*: the bandwidth of copies to the device. Figure 2 implies 8.75 GB/s;
* the *prefetch* of the baseline: off, as in S-LoRA's public code by default; beside the fifth and seventh decode step,
  as with its option; or whenever the link is idle;
* *admission*: every tenth step, as in S-LoRA's code, or every step, as Chameleon's section 4.1 says, for both systems
  or for Chameleon alone.

Every combination is a reading of equal rank. Runs of both systems are paired by seed; intervals are Student's, 95 %.
Results are the same on every machine. ``--cases`` keeps the runs, so that a stopped grid goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from publishing import RESULTS, arguments, publish, table

from manylora.experiments.cases import cases_of
from manylora.experiments.findings import Findings, Verdict
from manylora.experiments.read import read_experiment
from manylora.experiments.result import Result
from manylora.experiments.running import Runner
from manylora.experiments.spec import Claim, Experiment, Point
from manylora.measure import Interval, interval_of_runs

RATES = {0.173: (6, 8, 9, 11, 13, 14, 15, 16, 17), 0.2: (6, 8, 9, 11, 12, 13, 14, 15, 16)}
OTHER_RATES = (5, 6, 7, 8, 9, 10, 11, 12, 13)
"""Requests per second, to beyond the load at which the tail exceeds the SLO."""

LINK_GB_S = {1.0: "8.75", 0.2857: "2.5", 0.1: "0.875"}
"""Bandwidths, by their share of that of figure 2."""

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

CHANGES = {"6": (-0.147, -0.139), "8": (-0.246, -0.209), "9": (-0.807, -0.481)}
"""Published changes of the P99 and of the P50 of the time to first token, by load."""

NAMES = (
    *(f"{name} at {rate}" for name in ("P99", "P50") for rate in CHANGES),
    "S-LoRA's capacity",
    "Chameleon's capacity",
    "their ratio",
)


@dataclass(frozen=True)
class Cell:
    """One factor and one link: every setup at every load."""

    factor: float
    link_share: float

    @property
    def name(self) -> str:
        return f"factor {self.factor:g}, {LINK_GB_S[self.link_share]} GB/s"

    def experiment(self, base: Experiment, setups: Mapping[str, dict[str, object]]) -> Experiment:
        """Return its cases as an experiment, whose claims are those of one reading after another."""
        rates = RATES.get(self.factor, OTHER_RATES)
        changes = {"workload.lengths.scale": self.factor, "setup.link_share": self.link_share}
        points = tuple(Point(f"{rate}", float(rate), {**changes, "workload.arrivals.rate": rate}) for rate in rates)
        claims = tuple(claim for s_lora, chameleon in READINGS.values() for claim in claims_of(s_lora, chameleon))
        return replace(base, setups=setups, points=points, claims=claims)


def claims_of(s_lora: str, chameleon: str) -> Iterator[Claim]:
    """Return what was published, of one reading, in the order of ``NAMES``."""
    for place, figure in enumerate(("ttft_p99", "ttft_p50")):
        for rate, published in CHANGES.items():
            yield Claim(
                text=f"{figure} at {rate}",
                figure=figure,
                form="change",
                setup=chameleon,
                versus=s_lora,
                point=rate,
                published=published[place],
                tolerance=0.05,
                unit="%",
            )
    limit = {"figure": "ttft_p99", "limit": 5.0}
    yield Claim(text="", form="crossing", setup=s_lora, published=8.6, tolerance=0.9, unit="req/s", **limit)  # type: ignore[arg-type]
    yield Claim(text="", form="crossing", setup=chameleon, published=12.9, tolerance=1.3, unit="req/s", **limit)  # type: ignore[arg-type]
    yield Claim(
        text="",
        form="crossing-ratio",
        setup=chameleon,
        versus=s_lora,
        published=1.5,
        tolerance=0.1,
        unit="x",
        **limit,  # type: ignore[arg-type]
    )


def kv_share(runs: Sequence[Result]) -> Interval:
    """Return the peak of KV as a share of all memory but the weights."""
    shares = []
    for run in runs:
        curves = {name: np.asarray(run.curves[f"memory_{name}"].y) for name in ("weights", "kv", "all")}
        shares.append(float(np.max((curves["kv"] - curves["weights"]) / (curves["all"] - curves["weights"]))))
    return interval_of_runs(shares)


def figures_of(
    cell: Cell, experiment: Experiment, results: Mapping[tuple[str, str], Sequence[Result]]
) -> dict[str, Any]:
    """Return the figures of a cell: the comparisons of each reading, and what its runs were like."""
    findings = Findings(experiment, results)
    comparisons = iter(findings.compare())
    readings = {}
    for reading in READINGS:
        rows = {}
        for name in NAMES:
            one = next(comparisons)
            rows[name] = {
                "published": one.claim.published,
                "ours": None if one.ours is None else [one.ours.middle, one.ours.low, one.ours.high],
                "verdict": one.verdict.value,
            }
        readings[reading] = rows
    runs = {
        setup: {
            point.label: {
                **{
                    name: interval_of_runs([run.figures[name] for run in results[setup, point.label]]).middle
                    for name in ("ttft_p50", "ttft_p99", "tbt_p99", "hit_rate", "link_busy", "adapter_wait_p99")
                },
                "kv_share": kv_share(results[setup, point.label]).middle,
            }
            for point in experiment.points
        }
        for setup in experiment.setups
    }
    return {"factor": cell.factor, "link_gb_s": LINK_GB_S[cell.link_share], "readings": readings, "runs": runs}


def shown(row: Mapping[str, Any]) -> str:
    """Return a number beside its interval; bold where it agrees, "-" where the runs do not go that far."""
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
    heads = ["reading", *NAMES, "agree"]
    published = [
        "*published*",
        *(f"{100 * v[p]:+.1f} %" for p in (0, 1) for v in CHANGES.values()),
        "8.6",
        "12.9",
        "1.5",
        "",
    ]
    lines = [
        "# Chameleon's figures 11 and 13 among the readings of its text",
        "",
        "Changes of the time to first token, Chameleon against S-LoRA, in per cent, and the loads (req/s) at which the",
        f"P99 exceeds 5 s. Mean and 95 % interval over {num_seeds} paired seeds. **Bold** agrees with the publication:",
        "within 5 points, 0.9 and 1.3 req/s, and 0.1.",
        "",
        "![grid](chameleon_readings.png)",
    ]
    for cell in cells:
        at = cell["runs"]["s-lora-no-prefetch"]
        loads = [label for label in at if label in ("9", "13")]
        memory = ", ".join(f"{at[label]['kv_share']:.0%} at {label} req/s" for label in loads)
        lines += [
            "",
            f"## Factor {cell['factor']:g}, {cell['link_gb_s']} GB/s",
            "",
            f"KV at its peak: {memory} of the pool.",
            "",
        ]
        rows = [published]
        for reading, found in cell["readings"].items():
            agree = sum(found[name]["verdict"] == Verdict.AGREES.value for name in NAMES)
            rows.append([reading, *(shown(found[name]) for name in NAMES), f"{agree} of {len(NAMES)}"])
        lines += table(heads, rows)
    lines += ["", "## Time between tokens", "", "P99 at 9 req/s, in ms; published: below 150.", ""]
    systems = list(cells[0]["runs"])
    lines += table(
        ["cell", *systems],
        (
            [
                f"{cell['factor']:g}, {cell['link_gb_s']} GB/s",
                *(f"{cell['runs'][one]['9']['tbt_p99'] * 1e3:.0f}" for one in systems),
            ]
            for cell in cells
        ),
    )
    return "\n".join(lines)


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each published figure: cells down, readings across, a mark where ours agrees."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 11), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(NAMES):
        axes = figure.add_subplot(3, 3, place + 1)
        rows = [[cell["readings"][reading][name] for reading in READINGS] for cell in cells]
        values = np.array([[np.nan if one["ours"] is None else one["ours"][0] for one in row] for row in rows])
        published = rows[0][0]["published"]
        reach = max(abs(published) * 0.5, float(np.nanmax(np.abs(values - published), initial=0.0)))
        image = axes.imshow(values, cmap="RdBu", vmin=published - reach, vmax=published + reach, aspect="auto")
        for y, row in enumerate(rows):
            for x, one in enumerate(row):
                if one["ours"] is None:
                    continue
                text = f"{one['ours'][0] * 100:.0f}" if abs(published) < 1.0 else f"{one['ours'][0]:.1f}"
                weight = "bold" if one["verdict"] == Verdict.AGREES.value else "normal"
                axes.text(
                    x, y, f"[{text}]" if weight == "bold" else text, ha="center", va="center", fontsize=8, weight=weight
                )
        shown_as = f"{published * 100:+.1f} %" if abs(published) < 1.0 else f"{published:g}"
        axes.set_title(f"{name}: published {shown_as}", fontsize=10)
        is_last, is_first = place >= 6, place % 3 == 0
        axes.set_xticks(
            range(len(READINGS)),
            list(READINGS) if is_last else [""] * len(READINGS),
            rotation=60,
            ha="right",
            fontsize=7,
        )
        names = [f"{cell['factor']:g}, {cell['link_gb_s']} GB/s" for cell in cells]
        axes.set_yticks(range(len(cells)), names if is_first else [""] * len(cells), fontsize=7)
        figure.colorbar(image, ax=axes)
    figure.savefig(path, format="png", metadata={"Software": None})


def main() -> None:
    """Run the grid."""
    parser = arguments(__doc__, quick="one cell, one seed, a minute of arrivals")
    parser.add_argument("--traces", type=Path, required=True, help="folder of public traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case")
    parser.add_argument("--processes", type=int, default=1, help="parallel runs")
    parser.add_argument("--cases", type=Path, help="folder that keeps the runs")
    options = parser.parse_args()
    base = read_experiment("chameleon/readings")
    runner = Runner(options.cases, num_processes=options.processes)
    grid = [Cell(factor, link) for factor in (0.173, 0.2, 0.27, 0.3) for link in LINK_GB_S]
    if options.quick:
        grid, options.seeds = [Cell(0.27, 1.0)], 1
    cells = []
    for place, cell in enumerate(grid, 1):
        experiment = cell.experiment(base, base.setups)
        cases = cases_of(
            experiment, seeds=options.seeds, traces=options.traces, duration_s=60.0 if options.quick else None
        )
        results = runner.run(cases.values(), partial(progress, place, len(grid), cell))
        by_place: dict[tuple[str, str], list[Result]] = {}
        for (setup, label, _), case in cases.items():
            by_place.setdefault((setup, label), []).append(results[case.key])
        cells.append(figures_of(cell, experiment, by_place))
    sys.stderr.write("\n")
    if not options.quick:
        draw(cells, RESULTS / "chameleon_readings.png")
    publish(
        "chameleon_readings",
        {"seeds": options.seeds, "cells": cells},
        report(cells, options.seeds),
        is_kept=not options.quick,
    )


def progress(place: int, num_cells: int, cell: Cell, done: int, of: int) -> None:
    """Show how far it is."""
    sys.stderr.write(f"\r{place} of {num_cells}: {cell.name}: {done} of {of} runs   ")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
