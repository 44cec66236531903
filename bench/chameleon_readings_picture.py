"""The picture of `chameleon_readings.py`: a panel for each published figure, cells down, readings across."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manylora.lab.experiments.findings import Verdict
from manylora.lab.experiments.spec import Claim


def draw(cells: Sequence[Mapping[str, Any]], claims: Mapping[str, Claim], readings: Sequence[str], path: Path) -> None:
    """Draw all panels, with brackets where ours agrees; an empty field was left out, or is outside the search.

    White is the published figure, blue is above and red below it; the colours end at nothing and at twice as much,
    because a single cell far off would hide the others.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 11), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, claim) in enumerate(claims.items()):
        axes = figure.add_subplot(3, 3, place + 1)
        values = np.array([[ours_of(cell, reading, name) for reading in readings] for cell in cells])
        reach = abs(claim.published)
        axes.imshow(values, cmap="RdBu", vmin=claim.published - reach, vmax=claim.published + reach, aspect="auto")
        for (y, x), ours in np.ndenumerate(values):
            if np.isnan(ours):
                continue
            text = f"{ours * 100:.0f}" if claim.form == "change" else f"{ours:.3g}"
            agrees = cells[y]["readings"][readings[x]][name]["verdict"] == Verdict.AGREES.value
            axes.text(
                x,
                y,
                f"[{text}]" if agrees else text,
                ha="center",
                va="center",
                fontsize=9,
                color="white" if abs(ours - claim.published) > 0.6 * reach else "black",
                fontweight="bold" if agrees else "normal",
            )
        published = f"{claim.published:+.1%}" if claim.form == "change" else f"{claim.published:g}"
        axes.set_title(f"{name}: published {published}", fontsize=10)
        rows = [f"{cell['factor']:g}, {cell['link_gb_s']} GB/s" if place % 3 == 0 else "" for cell in cells]
        columns = list(readings) if place >= len(claims) - 3 else [""] * len(readings)
        axes.set_xticks(range(len(readings)), columns, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(cells)), rows, fontsize=8)
    figure.savefig(path, format="png", metadata={"Software": None})


def ours_of(cell: Mapping[str, Any], reading: str, name: str) -> float:
    """Return ours of a published figure; not a number where there is none."""
    found = cell["readings"].get(reading, {}).get(name)
    return float("nan") if found is None or found["ours"] is None else float(found["ours"][0])
