"""The scenario of a command: a file or a synthetic service, changed by options and by `--set`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.options import option
from manylora.lab.sim.scenario import Scenario, read_setting, with_setting
from manylora.lab.sim.setup import Setup
from manylora.lab.tables import read_table

__all__ = ["PLACES", "ScenarioFile", "Sets", "Traces", "WorkloadOptions", "change", "folders_of", "scenario_table"]

SYNTHETIC: dict[str, Any] = {
    "warm_up_s": 30,
    "workload": {
        "name": "synthetic",
        "num_requests": 1000,
        "arrivals": {"kind": "poisson", "rate": 2.0},
        "lengths": {
            "kind": "parametric",
            "prompt": {"kind": "gamma", "shape": 1.338, "scale": 863.0},
            "output": {"kind": "gamma", "shape": 1.646, "scale": 128.0},
            "bounds": {"max_prompt": 3072, "max_output": 1000},
        },
        "popularity": {"kind": "zipf"},
    },
    "setup": {"model": "llama-3-8b", "adapters": {"host_bytes": 64_000_000_000}},
    "slo": {"ttft_s": 5.0},
}
"""The default scenario: lengths as in the Azure conversation trace, a hundred adapters, one A40."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Settings of a workload and its SLO that have flags of their own."""

    rate: float | None = option(None, panel="Workload", help="Requests per second.")
    requests: int | None = option(None, panel="Workload", help="Most requests.")
    duration: float | None = option(None, panel="Workload", help="Longest time of arrivals in seconds.")
    adapters: int | None = option(None, panel="Workload", help="Number of adapters.")
    slo_ttft: float | None = option(None, panel="Objective", help="Longest time to first token, in seconds.")
    slo_tbt: float | None = option(None, panel="Objective", help="Longest time between two tokens, in seconds.")


PLACES: Mapping[type, str | Mapping[str, str]] = {
    Scenario: "",
    Setup: "setup.",
    SchedulerConfig: "setup.scheduler.",
    AdapterConfig: "setup.adapters.",
    WorkloadOptions: {
        "rate": "workload.arrivals.rate",
        "requests": "workload.num_requests",
        "duration": "workload.duration_s",
        "adapters": "workload.adapters.count",
        "slo_ttft": "slo.ttft_s",
        "slo_tbt": "slo.tbt_s",
    },
}
"""Prefix of the fields of each dataclass in a scenario, or the keys of its fields."""

ScenarioFile = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="A scenario in TOML; by default a synthetic service.", show_default=False),
]
Traces = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the scenario's traces.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any setting of a scenario, such as workload.lengths.scale=0.5. Repeatable."
    ),
]


def scenario_table(file: Path | None) -> dict[str, Any]:
    """Return the table of a file, or the synthetic service; ``ConfigError`` if the file is not TOML."""
    return read_table(file) if file is not None else dict(SYNTHETIC)


def change(table: Mapping[str, Any], given: Mapping[str, Any], sets: Iterable[str] | None) -> dict[str, Any]:
    """Return a scenario's table with other settings: those given, by dotted key, and those of `--set`, which go first.

    ``ConfigError`` if a setting is invalid.
    """
    changed = dict(table)
    for key, value in (dict(given) | dict(read_setting(text) for text in sets or ())).items():
        changed = with_setting(changed, key, value)
    return changed


def folders_of(file: Path | None, traces: Path | None) -> tuple[Path, ...]:
    """Return the search path of a scenario's files: its own folder, then the folder of traces."""
    return tuple(([file.parent] if file is not None else []) + ([traces] if traces is not None else []))
