"""The simulator against S-LoRA's own published measurements: its requests, its settings, its engine's rules.

The trace is the very one that was measured: S-LoRA's public benchmark draws it from numpy's generator with seed 42, and
so does this script. The device is a data sheet. Nothing is fitted to the table but one number, twice, on one row
(setting S1 on an A10G at one request a second), so that its mean latency is the measured one; all other rows, and the
other devices, are then predicted:

* *calibrated*: the time of a step that S-LoRA's host side takes (a router and a model process in Python), added;
* *launch-bound*: the time of a layer below which its host cannot launch the kernels of one, as a floor of the step.

*Whole answers reserved* is the calibrated setup that claims pages for all of an answer at once.

The file of measurements is `s-lora-measured.csv` among the public traces.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from publishing import RESULTS, arguments, publish, table

from manylora.core.plan import AdapterLoad, StepPlan
from manylora.lab.catalog.models import find_dims
from manylora.lab.costs.model import CostModel
from manylora.lab.experiments.cases import read_setup
from manylora.lab.experiments.read import read_experiment
from manylora.lab.experiments.spec import Table, merge
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import make_config
from manylora.lab.workloads.workload import AdapterSpec, RequestSpec, Workload

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
SHOWN = ("data sheet", "calibrated", "launch-bound")
SETUPS = (*SHOWN, "whole answers reserved")
SATURATED_S = 2.0
"""A row whose measured mean first token takes longer is saturated: its latency grows with the run."""


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
        return self.measured["first token"] > SATURATED_S

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

    def simulate(self, setup: Table, layer_s: float = 0.0) -> dict[str, float]:
        """Return the figures of a simulated run: requests per second until the last ends, and mean times in seconds."""
        pool = {
            "model": MODELS[self.setting],
            "hardware": self.device,
            "num_pages": POOLS[self.device, self.setting] // BLOCK_SIZE,
        }
        config = make_config(read_setup(merge(setup, pool)), targets=TARGETS, seed=0)
        floor_s = layer_s * find_dims(MODELS[self.setting]).num_layers
        run = simulate(self.workload(), replace(config, cost=LaunchBound(config.cost, floor_s)))
        assert all(one.error is None for one in run.records)
        return {
            "throughput": len(run.records) / max(one.arrived_at + one.e2e_s for one in run.records),
            "latency": float(np.mean([one.e2e_s for one in run.records])),
            "first token": float(np.mean([one.ttft_s or 0.0 for one in run.records])),
        }


@dataclass(frozen=True)
class LaunchBound:
    """A cost model whose steps take at least so long."""

    cost: CostModel
    floor_s: float

    def step_time_s(self, plan: StepPlan) -> float:
        return max(self.floor_s, self.cost.step_time_s(plan))

    def load_time_s(self, load: AdapterLoad) -> float:
        return self.cost.load_time_s(load)


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


def bisect(row: Row, latency_s: Callable[[float], float], high: float) -> float:
    """Return the value below ``high`` at which a rising latency is the measured one of a row."""
    low = 0.0
    for _ in range(12):
        middle = (low + high) / 2
        if latency_s(middle) < row.measured["latency"]:
            low = middle
        else:
            high = middle
    return round(middle, 6)


def error(ours: float, measured: float) -> str:
    """Return ours, and how far it is off."""
    return f"{ours:.2f} ({100 * (ours / measured - 1):+.0f} %)"


def report(
    rows: Sequence[Row], results: Sequence[Mapping[str, Mapping[str, float]]], host_s: float, layer_s: float
) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "# The simulator against S-LoRA's published measurements",
        "",
        "The same requests (seed 42) and S-LoRA's rules ([ADR 16](../../docs/adr/0016-s-lora-step-composition.md)).",
        "Devices by data sheet. Two setups have one number each that gives the measured latency of one row (S1, A10G,",
        f"1 req/s): *calibrated* adds {host_s * 1e3:.1f} ms of the host to a step, *launch-bound* lets no layer take",
        f"less than {layer_s * 1e3:.2f} ms. Every other figure is predicted. Throughput in requests per second until",
        "the last one ends, means in seconds. Beyond saturation (a mean first token of more than 2 s) latencies are",
        "those of a queue that grows until the run ends: a per cent of speed is many there.",
        "",
        "![simulated against measured](s_lora.png)",
        "",
        "## Errors",
        "",
    ]
    summary = []
    for device in dict.fromkeys(device for device, _ in POOLS):
        for name, is_saturated in (("below saturation", False), ("beyond", True)):
            for setup in SETUPS:
                chosen = [
                    (row, result[setup])
                    for row, result in zip(rows, results, strict=True)
                    if row.device == device and row.is_saturated is is_saturated
                ]
                errors = [[found[one] / row.measured[one] - 1 for row, found in chosen] for one in FIGURES]
                summary.append([f"{device}, {name}", setup, len(chosen), *map(spread, errors)])
    lines += table(["rows", "setup", "number", *(f"{one}: median (worst)" for one in FIGURES)], summary, left=2)
    for device, setting in POOLS:
        those = [
            (row, result)
            for row, result in zip(rows, results, strict=True)
            if (row.device, row.setting) == (device, setting)
        ]
        lines += ["", f"## {device}, {setting}: {MODELS[setting]}, ranks {', '.join(map(str, RANKS[setting]))}", ""]
        heads = ["run", *(f"{one}: {part}" for one in FIGURES for part in ("measured", *SHOWN))]
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
                            *(error(result[setup][one], row.measured[one]) for setup in SHOWN),
                        )
                    ),
                ]
                for row, result in those
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
        for setup, mark in zip(SHOWN, "xo+", strict=True):
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
    host_s = bisect(base, lambda value: base.simulate({**peak, "host_s": value})["latency"], 0.05)
    layer_s = bisect(base, lambda value: base.simulate(peak, value)["latency"], 0.005)
    setups = {
        "data sheet": (peak, 0.0),
        "calibrated": ({**peak, "host_s": host_s}, 0.0),
        "launch-bound": (peak, layer_s),
        "whole answers reserved": ({**whole, "host_s": host_s}, 0.0),
    }
    results: list[dict[str, dict[str, float]]] = []
    for place, row in enumerate(rows, 1):
        sys.stderr.write(f"\r{place} of {len(rows)}: {row.device} {row.setting} {row.name}      ")
        results.append({name: row.simulate(setup, floor_s) for name, (setup, floor_s) in setups.items()})
    sys.stderr.write("\n")
    if not options.quick:
        draw(rows, results, RESULTS / "s_lora.png")
    figures: dict[str, Any] = {
        "host_s": host_s,
        "layer_s": layer_s,
        "rows": [
            {"device": row.device, "setting": row.setting, "run": row.name, "measured": dict(row.measured), **result}
            for row, result in zip(rows, results, strict=True)
        ],
    }
    publish("s_lora", figures, report(rows, results, host_s, layer_s), is_kept=not options.quick)


if __name__ == "__main__":
    main()
