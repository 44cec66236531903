"""Plots of runs. matplotlib is an extra and takes a second to import, so functions import it when they draw.

Every function draws one file, in the format of its suffix, and returns its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.measure.records import RequestRecord, Timeline
from manylora.lab.measure.summary import gaps_of

__all__ = ["can_plot", "new_figure", "plot_latencies", "plot_memory", "plot_queues", "plot_rates"]

SIZE = (8.0, 4.0)
WIDE = (10.0, 4.0)
NUM_BINS = 100

MAX_POINTS = 2000  # points of a curve; more would only make the file larger


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_latencies(runs: Mapping[str, Seq[RequestRecord]], path: Path) -> Path:
    """Draw the distributions of time to first token and time between tokens, a curve for each run."""
    figure, (left, right) = new_figure(WIDE, columns=2)
    for label, records in runs.items():
        good = [record for record in records if record.error is None]
        _cdf(left, np.array([record.ttft_s for record in good if record.ttft_s is not None]), label)
        _cdf(right, gaps_of(good), label)
    for axes, title in ((left, "time to first token"), (right, "time between tokens")):
        axes.set(title=title, xlabel="seconds", ylabel="share of requests" if axes is left else "share of gaps")
        _log_seconds(axes)
        axes.set_ylim(0, 1)
    if len(runs) > 1:
        right.legend(frameon=False)
    return _save(figure, path)


def plot_memory(timeline: Timeline, path: Path) -> Path:
    """Draw the pages of each owner over time, stacked."""
    figure, (axes,) = new_figure(SIZE)
    owners = {
        "KV of running requests": "num_kv_pages",
        "idle prefixes": "num_prefix_pages",
        "adapters": "num_adapter_pages",
        "free": "num_free_pages",
    }
    rows = [np.asarray(timeline.gauges[name]) for name in owners.values()]
    colors = ("#4477aa", "#66ccee", "#ccbb44", "#eeeeee")
    axes.stackplot(np.asarray(timeline.at), rows, labels=list(owners), colors=colors, step="post")
    axes.set(xlabel="seconds", ylabel="pages", title="memory by owner")
    axes.margins(0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)
    return _save(figure, path)


def plot_queues(timeline: Timeline, path: Path) -> Path:
    """Draw how many requests ran, and how many waited in each of the policy's queues, over time."""
    figure, (axes,) = new_figure(SIZE)
    at = np.asarray(timeline.at)
    axes.plot(at, np.asarray(timeline.gauges["num_running"]), color="#888888", label="running")
    num_queues = max((len(row) for row in timeline.queues), default=0)
    for queue in range(num_queues):
        waiting = [row[queue] if queue < len(row) else np.nan for row in timeline.queues]
        axes.plot(at, waiting, label="waiting" if num_queues == 1 else f"waiting in queue {queue + 1}")
    axes.set(xlabel="seconds", ylabel="requests", title="running and waiting")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return _save(figure, path)


def plot_rates(runs: Mapping[str, Seq[RequestRecord]], path: Path) -> Path:
    """Draw answer tokens per second and requests in flight over the time of a run, a curve each for every run."""
    figure, (left, right) = new_figure(WIDE, columns=2)
    for label, records in runs.items():
        if not records:
            continue
        began = min(record.arrived_at for record in records)
        ended = max(record.finished_at for record in records)
        edges = np.linspace(0.0, max(ended - began, 1e-9), NUM_BINS + 1)
        at, weights = [np.empty(0)], [np.empty(0)]
        for record in records:
            if record.first_token_at is not None:  # a chunk counts as its share of the answer's tokens
                chunks = record.first_token_at - began + np.cumsum([0.0, *record.gaps_s])
                at.append(chunks)
                weights.append(np.full(len(chunks), record.num_output_tokens / len(chunks)))
        tokens, _ = np.histogram(np.concatenate(at), edges, weights=np.concatenate(weights))
        left.stairs(tokens / np.diff(edges), edges, label=label)
        starts = np.sort([record.arrived_at - began for record in records])
        ends = np.sort([record.finished_at - began for record in records])
        right.plot(edges, np.searchsorted(starts, edges, "right") - np.searchsorted(ends, edges, "right"), label=label)
    left.set(xlabel="seconds", ylabel="answer tokens per second", title="throughput")
    right.set(xlabel="seconds", ylabel="requests", title="in flight")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    if len(runs) > 1:
        right.legend(frameon=False)
    return _save(figure, path)


def _log_seconds(axes: Any) -> None:
    """Make the horizontal axis logarithmic, with labels 0.1, 0.2, 0.5, 1."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _cdf(axes: Any, values: np.ndarray[Any, np.dtype[np.float64]], label: str) -> None:
    if not len(values):
        return
    shares = np.linspace(0.0, 1.0, min(MAX_POINTS, max(2, len(values))))
    axes.plot(np.quantile(values, shares), shares, label=label)


def new_figure(size: tuple[float, float], columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes, without a window or a global state.

    ``ConfigError`` if matplotlib is not installed.
    """
    if not can_plot():
        raise ConfigError("Plots need matplotlib: pip install 'manylora[plots]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path
