"""A scenario: a workload, the engines that serve it and the SLO, as one TOML file.

::

    seed = 0
    warm_up_s = 60

    [workload]            # lab/workloads/spec.py
    [setup]               # lab/sim/setup.py: model, hardware, replicas, scheduler, adapter cache
    [slo]                 # measure.Slo
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.core.plugins import with_files_found
from manylora.lab.measure import Slo
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.tables import TableReader, same_key
from manylora.lab.workloads import Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.spec import KINDS

__all__ = ["Scenario", "read_scenario", "read_setting", "with_setting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(CheckedOptions):
    """A workload, the engines that serve it, and the SLO."""

    workload: WorkloadSpec
    setup: Setup = field(default_factory=Setup)
    slo: Slo = field(default_factory=Slo)
    seed: int = option(
        0, panel="Workload", at_least=0, help="Seed of the workload, the router and the noisy predictor."
    )
    warm_up_s: float = option(
        0.0, panel="Objective", unit="s", at_least=0, help="Requests of this initial period are served and not counted."
    )

    def make_workload(self) -> Workload:
        """Make the workload; ``ConfigError`` if a trace cannot be read, or its parts are inconsistent."""
        return make_workload(self.workload, self.seed)

    def make_config(self) -> SimulationConfig:
        """Return the simulator's configuration.

        ``ConfigError`` if a name is unknown, a file is not usable, or the model does not fit.
        """
        return make_config(self.setup, targets=self.workload.adapters.targets, seed=self.seed)


def read_scenario(table: Mapping[str, Any], *, folders: tuple[Path, ...] = ()) -> Scenario:
    """Make a scenario from the content of a TOML file; traces with relative paths are in one of ``folders``.

    ``ConfigError`` if a key is unknown or a value is wrong; the message has its place.
    """
    return TableReader(KINDS, folders).read(Scenario, with_files_found(table, folders), "scenario")


def read_setting(text: str) -> tuple[str, Any]:
    """Read `KEY=VALUE`; the value is TOML, or a bare word.

    ``ConfigError`` if the text has no `=`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"Got {text!r}, expected KEY=VALUE such as setup.scheduler.max_num_seqs=64")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def with_setting(table: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of a scenario's table with the value of a dotted key, such as ``setup.scheduler.policy``, changed.

    ``ConfigError`` if a part of the key is not a table.
    """
    first, _, rest = key.partition(".")
    name = same_key(table, first)
    if not rest:
        return {**table, name: value}
    inner = table.get(name, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"Got {key} = {value!r}, and {name} is {inner!r}, no table")
    return {**table, name: with_setting(inner, rest, value)}
