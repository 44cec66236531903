"""The parity benchmark's figures as a page for people."""

from __future__ import annotations

from typing import Any

from parity_columns import COLUMNS, WINDOW_S
from publishing import table

GOALS = {"p50": 0.1, "p99": 0.2}
"""How far a percentile may be from the live one, for time to first token and between tokens."""

ERRORS = ("median error", "P90")

NAMES = {"ttft": "time to first token", "tbt": "between tokens", "e2e": "time in all"}


def page(figures: dict[str, Any]) -> str:
    return "\n".join([*head(figures), *decided(figures), *latencies(figures), *prices(figures), ""])


def head(figures: dict[str, Any]) -> list[str]:
    replayed = figures["replayed"]
    return [
        "# Live and simulated",
        "",
        f"`{figures['command']}` on {figures['machine']}: an 82M-parameter Llama, {figures['adapters']} adapters of "
        f"rank {figures['ranks'][0]} to {figures['ranks'][-1]} on all linears, a pool of {figures['num_pages']} pages, "
        f"{figures['requests']} requests by a Poisson process at {figures['requests_per_s']:.2f} a second, "
        f"{figures['share_of_capacity']:.0%} of the capacity that the simulator finds. Live it took "
        f"{figures['live_s']:.0f} s; simulating it {figures['simulated_in_s']:.1f} s. The load average before was "
        f"{figures['load_average_before']:.1f}; steps of the sweep after the run took {figures['drift']:.2f} times "
        "what the sweep before it predicted.",
        "",
        f"Replayed with its own step and load times, the live run gives **{replayed['same']:,} of "
        f"{replayed['events']:,} events the same**, times included: the simulator is the server's code. What follows "
        "compares the live run with simulations that know when requests come, and of the machine:",
        "",
        *table(("column", "knows"), COLUMNS.items(), left=2),
        "",
        *(
            f"Drift {where}: {shown(figures['components'][name])}."
            for name, where in (("sweeps", "in the sweeps"), ("live", "in the live run"))
        ),
        "",
    ]


def shown(components: list[dict[str, float]]) -> str:
    return ", ".join(f"{one['size']:.0%} for {one['length_s']:.2g} s" for one in components) or "none"


def latencies(figures: dict[str, Any]) -> list[str]:
    found = figures["latencies"]
    lines = [
        "## Latencies",
        "",
        "The error of the median over seeds, and the range of errors over seeds: what chance alone makes of such a "
        "machine. Bold is within the goal, 10 % at the median and 20 % at the 99th percentile.",
        "",
    ]
    rows = []
    for what, by in found.items():
        for at, one in by.items():
            goal = GOALS.get(at) if what != "e2e" else None
            cells = [cell(one["columns"][name], one["live"], goal) for name in COLUMNS]
            name = f"{NAMES[what]}, {at if at == 'mean' else at.upper()}"
            rows.append((name, ms(one["live"]), *cells))
    return [*lines, *table(("", "live", *COLUMNS), rows), ""]


def cell(column: dict[str, float], live: float, goal: float | None) -> str:
    error = f"{column['error']:+.1%}"
    if goal is not None and abs(column["error"]) <= goal:
        error = f"**{error}**"
    if column["low"] == column["high"]:
        return error
    return f"{error} ({column['low'] / live - 1:+.0%} to {column['high'] / live - 1:+.0%})"


def decided(figures: dict[str, Any]) -> list[str]:
    counted, alike = figures["counts"], figures["decisions"]
    figures_of = next(iter(alike.values()))
    return [
        "## Decisions",
        "",
        *table(
            ("first seed", *counted),
            ([name, *(show(one[name]) for one in counted.values())] for name in counted["live"]),
        ),
        "",
        *table(
            ("alike (1: the same throughout)", *alike),
            ([name, *(f"{one[name]:.3f}" for one in alike.values())] for name in figures_of),
        ),
        "",
    ]


def prices(figures: dict[str, Any]) -> list[str]:
    sweeps = " and ".join(map(str, figures["calibration_steps"]))
    return [
        "## The price of steps",
        "",
        "Prices against the steps of the live run, one by one: those of the sweeps, which have not seen it, and those "
        "of its own other folds. R² *at even speed* is with the machine's speed taken out, as the other steps within "
        f"{WINDOW_S:g} s show it, the step itself left out: what is wrong about all steps of a window goes with it.",
        "",
        *table(
            ("", "steps", "sum predicted / measured", *ERRORS, "R²", "at even speed", "R² of folds", "at even speed"),
            (
                [kind, one["steps"], f"{one['predicted_over_measured']:.3f}", *errors(one)]
                + [f"{one[f'r2_{name}']:.3f}" for name in ("sweeps", "sweeps_even", "folds", "folds_even")]
                for kind, one in figures["steps"].items()
            ),
        ),
        "",
        f"And on stretches of the sweeps that were held out, of {sweeps} steps; there the speed is what the steps "
        "before and after a stretch show of it:",
        "",
        *table(
            ("", "steps", "R²", "R² at even speed", *ERRORS),
            (
                [one["regime"], one["num_steps"]]
                + ["-" if r2 is None else f"{r2:.3f}" for r2 in (one["r2"], one["steady_r2"])]
                + errors(one)
                for one in figures["profile_errors"]
            ),
        ),
    ]


def errors(one: dict[str, float]) -> list[str]:
    return [f"{one['median_error']:.1%}", f"{one['p90_error']:.1%}"]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def show(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"
