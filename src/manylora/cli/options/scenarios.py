"""The scenario of a command: a file or a synthetic service, changed by options and by `--set`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.lab.sim.scenario import Scenario, read_setting, with_setting
from manylora.lab.sim.setup import Setup
from manylora.lab.workloads.tables import read_table

__all__ = ["PLACES", "SETS", "SYNTHETIC", "TRACES", "change", "folders_of", "scenario_table"]

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

PLACES: dict[type, str] = {
    Scenario: "",
    Setup: "setup.",
    SchedulerConfig: "setup.scheduler.",
    AdapterConfig: "setup.adapters.",
}
"""Prefix of the fields of each dataclass in a scenario."""

TRACES: Any = typer.Option(metavar="DIR", help="Folder of the scenario's traces.")
SETS: Any = typer.Option(
    "--set",
    metavar="KEY=VALUE",
    help="Any setting of a scenario, such as workload.lengths.scale=0.5. Repeatable.",
)


def scenario_table(file: Path | None) -> dict[str, Any]:
    """Return the table of a file, or the synthetic service; ``ConfigError`` if the file is not TOML."""
    return read_table(file) if file is not None else dict(SYNTHETIC)


def change(table: Mapping[str, Any], given: Mapping[str, Any], sets: Iterable[str] | None) -> dict[str, Any]:
    """Return a scenario's table with the options that were given.

    Args:
        table: The scenario.
        given: Values by dotted key; ``None`` for an option that was not given.
        sets: From `--set`, which takes precedence.

    Raises:
        ConfigError: A setting is invalid.
    """
    changed = dict(table)
    settings = {key: value for key, value in given.items() if value is not None}
    for key, value in (settings | dict(read_setting(text) for text in sets or ())).items():
        changed = with_setting(changed, key, value)
    return changed


def folders_of(file: Path | None, traces: Path | None) -> tuple[Path, ...]:
    """Return the search path of a scenario's files: its own folder, then that of traces."""
    return tuple(([file.parent] if file is not None else []) + ([traces] if traces is not None else []))
