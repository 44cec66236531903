"""The simulator against S-LoRA's own published measurements: its requests, its settings, its engine's rules.

The trace is the very one that was measured: S-LoRA's public benchmark draws it from numpy's generator with seed 42, and
so does this script. The device is a data sheet; nothing is fitted to the table but, in the column *calibrated*, one
number: the time per step that S-LoRA's host side takes (a router, a tokenizer and a model process in Python), found so
that the mean latency of one row, setting S1 on an A10G at one request a second, is the measured one. The first column
has the simulator's default of a millisecond. All other rows, and the other devices, are then foretold.

The file of measurements is `s-lora-measured.csv` among the public traces.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from publishing import RESULTS, arguments, publish, table

from manylora.experiments.cases import read_setup
from manylora.experiments.read import read_experiment
from manylora.experiments.spec import Table, merge
from manylora.sim.run.simulation import simulate
from manylora.sim.setup import make_config
from manylora.workloads.workload import AdapterSpec, RequestSpec, Workload

SEED = 42
BLOCK_SIZE = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

MODELS = {"S1": "llama-7b", "S2": "llama-7b", "S4": "llama-13b"}
RANKS = {"S1": (8,), "S2": (64, 32, 16, 8), "S4": (64, 32, 16)}
"""Models and ranks of its settings."""

POOLS = {("a10g", "S1"): 14_500, ("a10g", "S2"): 14_500, ("a100-80", "S2"): 125_000, ("a100-80", "S4"): 65_000}
"""Tokens in the pool, by its scripts."""

CALIBRATED_ON = ("S1", 1.0)
FIGURES = {"throughput": "throughput_rps", "latency": "avg_latency_s", "first token": "avg_first_token_s"}
SATURATED = 0.95
"""A row whose measured throughput is below this share of its rate is saturated: its latency grows with the run."""


@dataclass(frozen=True)
class Row:
    """A measurement, and the run that was measured."""

    device: str
    setting: str
    num_adapters: int
    alpha: float
    rate: float
    cv: float
    duration_s: float
    measured: Mapping[str, float]

    @property
    def is_saturated(self) -> bool:
        return self.measured["throughput"] < SATURATED * self.rate and self.cv == 1

    @property
    def name(self) -> str:
        return f"{self.rate:g} req/s, {self.num_adapters} adapters" + (f", cv {self.cv:g}" if self.cv != 1 else "")

    def workload(self) -> Workload:
        """Return its requests, drawn as S-LoRA's benchmark draws them."""
        rng = np.random.RandomState(SEED)
        count = int(self.rate * self.duration_s)
        places = (rng.power(self.alpha, count) * self.num_adapters).astype(int)
        prompts, answers = rng.randint(8, 512, count), rng.randint(8, 512, count)
        times = np.cumsum(rng.gamma(1.0 / self.cv**2, self.cv**2 / self.rate, count))
        ranks = RANKS[self.setting]
        return Workload(
            name="s-lora",
            requests=tuple(
                RequestSpec(
                    arrival_s=float(at),
                    num_prompt_tokens=int(prompt) + 1,  # a word each, and the beginning of the text
                    num_output_tokens=int(answer),
                    adapter=f"a{place}",
                )
                for at, prompt, answer, place in zip(times, prompts, answers, places, strict=True)
            ),
            adapters=tuple(
                AdapterSpec(name=f"a{place}", rank=ranks[place % len(ranks)]) for place in range(self.num_adapters)
            ),
        )

    def simulate(self, setup: Table) -> dict[str, float]:
        """Return the figures of a simulated run: requests per second until the last ends, and mean times in seconds."""
        pool = {
            "model": MODELS[self.setting],
            "hardware": self.device,
            "num_pages": POOLS[self.device, self.setting] // BLOCK_SIZE,
        }
        run = simulate(self.workload(), make_config(read_setup(merge(setup, pool)), targets=TARGETS, seed=0))
        assert all(one.error is None for one in run.records)
        return {
            "throughput": len(run.records) / max(one.arrived_at + one.e2e_s for one in run.records),
            "latency": float(np.mean([one.e2e_s for one in run.records])),
            "first token": float(np.mean([one.ttft_s or 0.0 for one in run.records])),
        }


def read_rows(path: Path) -> list[Row]:
    """Return the measurements of S-LoRA itself whose requests and pool are known, each once."""
    rows: dict[tuple[object, ...], Row] = {}
    for one in csv.DictReader(path.open()):
        if one["system"] != "slora" or not one["alpha"] or (one["device"], one["setting"]) not in POOLS:
            continue
        if int(one["num_adapters"]) == 0:
            continue
        row = Row(
            one["device"],
            one["setting"],
            int(one["num_adapters"]),
            float(one["alpha"]),
            float(one["req_rate"]),
            float(one["cv"]),
            float(one["duration_s"]),
            {name: float(one[column]) for name, column in FIGURES.items()},
        )
        rows.setdefault((row.device, row.setting, row.num_adapters, row.rate, row.cv, row.duration_s), row)
    return [rows[key] for key in sorted(rows, key=str)]


def calibrated(setup: Table, row: Row) -> Table:
    """Return the setup with the host's time per step that gives a row's measured latency, by bisection."""
    low, high = 0.0, 0.05
    for _ in range(12):
        middle = (low + high) / 2
        if row.simulate({**setup, "host_s": middle})["latency"] < row.measured["latency"]:
            low = middle
        else:
            high = middle
    return {**setup, "host_s": round(middle, 5)}


def error(ours: float, measured: float) -> str:
    """Return ours, and how far it is off."""
    return f"{ours:.2f} ({100 * (ours / measured - 1):+.0f} %)"


def report(rows: Sequence[Row], results: Sequence[Mapping[str, Mapping[str, float]]], host_s: float) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "# The simulator against S-LoRA's published measurements",
        "",
        "The same requests (seed 42) and S-LoRA's rules ([ADR 16](../../docs/adr/0016-s-lora-step-composition.md)).",
        f"Devices by data sheet. *Calibrated*: the host's time per step, {host_s * 1e3:.1f} ms, gives the measured",
        "latency of one row (S1, A10G, 1 req/s); every other figure is foretold. Throughput in requests per second",
        "until the last one ends, means in seconds. Beyond saturation latencies are those of a queue that grows until",
        "the run ends: a per cent of speed is many there.",
        "",
        "![simulated against measured](s_lora.png)",
        "",
        "## Errors",
        "",
    ]
    summary = []
    for name, is_saturated in (("below saturation", False), ("beyond saturation or bursts", True)):
        for setup in ("data sheet", "calibrated", "whole answers reserved"):
            chosen = [
                (row, result[setup])
                for row, result in zip(rows, results, strict=True)
                if (row.is_saturated or row.cv != 1) is is_saturated
            ]
            summary.append(
                [
                    name,
                    setup,
                    len(chosen),
                    *(spread([found[one] / row.measured[one] - 1 for row, found in chosen]) for one in FIGURES),
                ]
            )
    lines += table(["rows", "setup", "number", *(f"{one}: median (worst)" for one in FIGURES)], summary, left=2)
    for device, setting in POOLS:
        chosen = [
            (row, result)
            for row, result in zip(rows, results, strict=True)
            if (row.device, row.setting) == (device, setting)
        ]
        lines += ["", f"## {device}, {setting}: {MODELS[setting]}, ranks {', '.join(map(str, RANKS[setting]))}", ""]
        heads = ["run", *(f"{one}: {part}" for one in FIGURES for part in ("measured", "data sheet", "calibrated"))]
        lines += table(
            heads,
            (
                [
                    row.name,
                    *(
                        text
                        for one in FIGURES
                        for text in (
                            f"{row.measured[one]:.2f}",
                            error(result["data sheet"][one], row.measured[one]),
                            error(result["calibrated"][one], row.measured[one]),
                        )
                    ),
                ]
                for row, result in chosen
            ),
        )
    return "\n".join(lines)


def spread(errors: Sequence[float]) -> str:
    """Return the median error and the worst."""
    worst = max(errors, key=abs)
    return f"{100 * float(np.median(errors)):+.1f} % ({100 * worst:+.0f} %)"


def draw(rows: Sequence[Row], results: Sequence[Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draw ours over the measured, a panel for each figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    for place, one in enumerate(FIGURES):
        axes = figure.add_subplot(1, 3, place + 1)
        for setup, mark in (("data sheet", "x"), ("calibrated", "o")):
            pairs = [(row.measured[one], result[setup][one]) for row, result in zip(rows, results, strict=True)]
            axes.plot(*zip(*pairs, strict=True), mark, label=setup, markersize=4, fillstyle="none", linestyle="none")
        ends = [min(row.measured[one] for row in rows), max(row.measured[one] for row in rows)]
        axes.plot(ends, ends, color="#666666", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(one, fontsize=10)
        axes.set_xlabel("measured")
        axes.set_ylabel("simulated" if place == 0 else "")
        axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png", metadata={"Software": None})


def main() -> None:
    """Simulate every row."""
    parser = arguments(__doc__, quick="two rows")
    parser.add_argument("--traces", type=Path, required=True, help="folder of public traces")
    options = parser.parse_args()
    rows = read_rows(options.traces / "s-lora-measured.csv")
    peak = read_experiment("chameleon/readings").setups["s-lora-no-prefetch"]
    whole = merge(peak, {"scheduler": {"reserve_output": "whole"}})
    if options.quick:
        rows = [row for row in rows if (row.device, row.setting) == ("a10g", "S1") and row.rate in (1.0, 1.5)]
    base = next(row for row in rows if (row.setting, row.rate) == CALIBRATED_ON)
    fitted = calibrated(peak, base)
    host_s = float(str(fitted["host_s"]))
    setups = {"data sheet": peak, "calibrated": fitted, "whole answers reserved": {**whole, "host_s": host_s}}
    results: list[dict[str, dict[str, float]]] = []
    for place, row in enumerate(rows, 1):
        sys.stderr.write(f"\r{place} of {len(rows)}: {row.device} {row.setting} {row.name}      ")
        results.append({name: row.simulate(setup) for name, setup in setups.items()})
    sys.stderr.write("\n")
    if not options.quick:
        draw(rows, results, RESULTS / "s_lora.png")
    figures: dict[str, Any] = {
        "host_s": host_s,
        "rows": [
            {"device": row.device, "setting": row.setting, "run": row.name, "measured": dict(row.measured), **result}
            for row, result in zip(rows, results, strict=True)
        ],
    }
    publish("s_lora", figures, report(rows, results, host_s), is_kept=not options.quick)


if __name__ == "__main__":
    main()
