"""The picture of `cold_map.py`: break-even lines by rank and device, and live points beside simulated ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cold_map_points import CORES, DEVICES, PROMPTS, QUEUED, RANKS, Point

from manylora.lab.catalog.hardware import HARDWARE

COLD = "first token of cold requests"
SHADED_CORES = 32
SMALLEST, LARGEST = -100.0, 100.0


class LivePoint(NamedTuple):
    """Cold requests on a live engine with a paced link: a copy's duration in steps, and the gain of assistance."""

    copy_steps: float
    gain: float


def read_live(path: Path) -> list[LivePoint]:
    """Return the points of a result of `cold_start.py`, none without one.

    Its engines are named by the way in which cold requests start, and by the duration of a copy: "wait, 4 steps".
    """
    if not path.is_file():
        return []
    by_steps: dict[float, dict[str, float]] = {}
    for name, figures in json.loads(path.read_text())["engines"].items():
        way, comma, steps = name.partition(", ")
        if comma and steps.endswith(" steps"):
            by_steps.setdefault(float(steps.removesuffix(" steps")), {})[way] = figures["ms"][COLD]["P50"]
    points = []
    for steps, times in sorted(by_steps.items()):
        others = [times[way] for way in ("wait", "layers") if way in times]
        if "assist" in times and others:
            points.append(LivePoint(steps, 1.0 - times["assist"] / min(others)))
    return points


def draw(points: Sequence[Point], live: Sequence[LivePoint], path: Path) -> None:
    """Draw a map for each rank and device on its own link, and all points of that rank by wait over step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(15.0, 11.5), layout="constrained")
    FigureCanvasAgg(figure)
    maps, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 1.25))[:, 0]
    grid = maps.subplots(len(RANKS), len(DEVICES), sharex=True, sharey=True)
    widths = dict(zip(CORES, (0.6, 1.2, 2.2, 3.4), strict=True))
    for row, rank in enumerate(RANKS):
        for column, device in enumerate(DEVICES):
            axes = grid[row][column]
            for cores in CORES:
                gains = _gains(points, device, rank, cores)
                if cores == SHADED_CORES:
                    shade = axes.pcolormesh(
                        range(len(PROMPTS)), range(len(QUEUED)), gains, cmap="RdBu", vmin=SMALLEST, vmax=LARGEST
                    )
                if gains.min() < 0 < gains.max():
                    axes.contour(gains, levels=[0.0], colors="black", linewidths=widths[cores])
            axes.set_xticks(range(len(PROMPTS)), [str(one) for one in PROMPTS])
            axes.set_yticks(range(len(QUEUED)), [str(one) for one in QUEUED])
            link = HARDWARE[device].link_bytes_per_s / 1e9
            if row == 0:
                axes.set_title(f"{device}, link of {link:g} GB/s")
            if column == 0:
                axes.set_ylabel(f"rank {rank}\ncopies queued before its own")
            if row == len(RANKS) - 1:
                axes.set_xlabel("prompt tokens")
    maps.colorbar(shade, ax=grid, label=f"gain of assistance on {SHADED_CORES} cores, % of TTFT", shrink=0.6)
    lines = [Line2D([], [], color="black", linewidth=width, label=f"{cores} cores") for cores, width in widths.items()]
    grid[0][0].legend(handles=lines, title="break-even", loc="upper left", fontsize="small")
    maps.suptitle("CPU assistance against the better of waiting and layers: Llama-2-7B, q, k and v, 16 others decode")
    _draw_waits(below.subplots(), points, live)
    figure.savefig(path, dpi=80)


def _gains(points: Sequence[Point], device: str, rank: int, cores: int) -> Any:
    """Return the gain in per cent by queued copies and prompt, on the device's own link."""
    gains = np.zeros((len(QUEUED), len(PROMPTS)))
    for one in points:
        link = HARDWARE[device].link_bytes_per_s
        place = (one.device, one.modules, one.link_bytes_per_s, one.rank, one.cores)
        if place == (device, "q, k, v", link, rank, cores):
            gains[QUEUED.index(one.queued), PROMPTS.index(one.prompt)] = 100 * one.gain
    return gains


def _draw_waits(axes: Any, points: Sequence[Point], live: Sequence[LivePoint]) -> None:
    for cores, colour in zip(CORES, ("#c6dbef", "#6baed6", "#2171b5", "#08306b"), strict=True):
        chosen = [one for one in points if one.cores == cores and one.prompt <= 64]
        waits = [(one.queued + 1) * one.copy_s / one.decode_s for one in chosen]
        axes.scatter(waits, [100 * one.gain for one in chosen], s=5, color=colour, label=f"simulated, {cores} cores")
    if live:
        axes.scatter(
            [one.copy_steps for one in live],
            [100 * one.gain for one in live],
            marker="*",
            s=160,
            color="#d62728",
            label="live, on a CPU",
        )
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(xscale="log", ylim=(-150, 100), ylabel="gain, %")
    axes.set_xlabel(
        "wait for the whole adapter, in steps of the batch (prompts of up to 64 tokens, every link and rank)"
    )
    axes.legend(fontsize="small", loc="lower right")
