"""Plots of an experiment, as PNG."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from io import BytesIO
from itertools import cycle
from typing import Any

import numpy as np

from manylora.lab.experiments.findings import Findings
from manylora.lab.experiments.spec import Plot, Point
from manylora.lab.measure.plots import new_figure

__all__ = ["draw"]

SIZE = (6.4, 3.6)
COLOURS = ("#b3432b", "#3b6ea5", "#4f8a4c", "#8c6bb1", "#c98a1b", "#5f6b73", "#1aa6a6", "#d16ba5")


def draw(findings: Findings, plot: Plot) -> bytes:
    """Return a picture of an experiment as the bytes of a PNG; ``ConfigError`` if matplotlib is not installed."""
    figure, (axes,) = new_figure(SIZE)
    experiment = findings.experiment
    points = [point for point in experiment.points if not plot.at or point.label in plot.at]
    setups = [name for name in (plot.setups or experiment.setups) if name in experiment.setups]
    {"lines": _lines, "bars": _bars, "curves": _curves}[plot.kind](axes, findings, plot, setups, points)
    if plot.limit is not None:
        axes.axhline(plot.limit, color="#666666", linestyle="--", linewidth=1)
    if plot.log:
        axes.set_yscale("log")
    axes.set_title(plot.title or experiment.title, fontsize=10)
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return buffer.getvalue()


def _values(findings: Findings, plot: Plot, setup: str, point: Point) -> list[float]:
    """Return the figure that is drawn at a point, by seed."""
    values = [run.figures.get(plot.show, np.nan) for run in findings.runs(setup, point.label)]
    if plot.versus is not None:
        others = [run.figures.get(plot.show, np.nan) for run in findings.runs(plot.versus, point.label)]
        values = [value / other if other else np.nan for value, other in zip(values, others, strict=True)]
    return values


def _lines(axes: Any, findings: Findings, plot: Plot, setups: Seq[str], points: Seq[Point]) -> None:
    """Draw a figure over the points: the mean, and a band from the least to the greatest seed."""
    for colour, setup in zip(cycle(COLOURS), setups, strict=False):
        columns = np.array([_values(findings, plot, setup, point) for point in points])
        x = [point.x for point in points]
        axes.plot(x, columns.mean(axis=1), marker="o", markersize=3.5, color=colour, label=setup)
        axes.fill_between(x, columns.min(axis=1), columns.max(axis=1), color=colour, alpha=0.15, linewidth=0)


def _bars(axes: Any, findings: Findings, plot: Plot, setups: Seq[str], points: Seq[Point]) -> None:
    """Draw a figure as groups of bars, a group for each point; whiskers reach to the least and greatest seed."""
    width = 0.8 / len(setups)
    for place, (colour, setup) in enumerate(zip(cycle(COLOURS), setups, strict=False)):
        columns = np.array([_values(findings, plot, setup, point) for point in points])
        means = columns.mean(axis=1)
        reach = np.abs(np.stack([means - columns.min(axis=1), columns.max(axis=1) - means]))
        x = np.arange(len(points)) + (place - (len(setups) - 1) / 2) * width
        axes.bar(x, means, width, yerr=reach, color=colour, label=setup, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(points)), [point.label for point in points], fontsize=8)


def _curves(axes: Any, findings: Findings, plot: Plot, setups: Seq[str], points: Seq[Point]) -> None:
    """Draw curves that the runs of the first seed kept, of several names where ``show`` lists them."""
    names = plot.show.split()
    lines = [(setup, point, name) for setup in setups for point in points for name in names]
    for colour, (setup, point, name) in zip(cycle(COLOURS), lines, strict=False):
        curve = findings.runs(setup, point.label)[0].curves.get(name)
        if curve is not None:
            parts = [setup] * (len(setups) > 1) + [point.label] * (len(points) > 1) + [name] * (len(names) > 1)
            axes.plot(curve.x, curve.y, color=colour, linewidth=1.4, label=", ".join(parts))
