"""The settings of a plan, `[plan]` of a scenario's file, and the variants of a scenario that are compared.

::

    [plan]
    rate = 20.0                      # traffic, all replicas together
    percentile = 99
    prices = { a40 = 0.8, l40s = 1.2 }    # per device and hour; or price = 1.1 for any

    [plan.compare]                   # each with each
    gpu = ["a40", "l40s"]
    policy = ["fifo", "chameleon"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from manylora.core.adapters.folder import CONFIG_FILE, read_config
from manylora.core.adapters.lora.settings import parse_lora
from manylora.core.adapters.sources import open_folder
from manylora.core.errors import ConfigError
from manylora.core.options import option
from manylora.lab.planning.load_test import SearchBudget
from manylora.lab.planning.plan import TrafficDemand
from manylora.lab.sim.scenario import read_setting, with_setting
from manylora.lab.tables import TableReader

__all__ = ["SHORT", "Axis", "PlanSettings", "Variant", "adapters_in", "read_axis", "read_plan_settings", "variants"]

SHORT = {
    "adapters": "workload.adapters.count",
    "eviction": "setup.adapters.eviction",
    "gpu": "setup.hardware",
    "hardware": "setup.hardware",
    "kernel": "setup.lora_kernel",
    "model": "setup.model",
    "policy": "setup.scheduler.policy",
    "tp": "setup.tensor_parallel_size",
}
"""Short names of settings that are often compared."""

MEASURED = ("setup.hardware", "setup.model", "setup.lora_kernel")  # what a profile takes the place of

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and the values it takes."""

    label: str  # the name in the command
    key: str  # the dotted name of the setting
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination: its values by label, and the scenario's table with these values."""

    settings: dict[str, str]
    table: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of a plan beside the scenario.

    ``rate`` counts all replicas together; without it the plan is for one full replica.
    """

    rate: float | None = option(
        None, panel="Workload", help="Traffic in requests per second, to find the number of replicas."
    )
    percentile: float = option(
        99.0, panel="Objective and cost", help="Percentage of requests that must meet the SLO; 99 by default."
    )
    requests: int = option(2000, panel="Search", help="Fewest requests of a run; 2000 by default.")
    seeds: int = option(2, panel="Search", help="Runs of each load test; 2 by default.")
    tolerance: float = option(0.02, panel="Search", help="Relative error of the capacity found; 0.02 by default.")
    price: float | None = None  # per device and hour, for kinds that are not in ``prices``
    prices: Mapping[str, float] = field(default_factory=dict)  # per device and hour, by kind of hardware
    compare: tuple[Axis, ...] = ()  # settings to vary; every combination is planned

    def demand(self, hardware: str) -> TrafficDemand:
        """Return the demand, with the price of a kind of hardware; ``ConfigError`` if a value is out of range."""
        return TrafficDemand(
            rate=self.rate,
            price_per_hour=self.prices.get(hardware, self.price),
            tolerance=self.tolerance,
            search_budget=SearchBudget(num_requests=self.requests, seeds=self.seeds),
        )


def read_plan_settings(table: object) -> PlanSettings:
    """Read `[plan]`.

    ``ConfigError`` if a key is unknown or a value of the wrong kind; the message says where it stands.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"Got plan = {table!r}, expected a table")
    axes = table.get("compare", {})
    if not isinstance(axes, Mapping):
        raise ConfigError(f"Got plan.compare = {axes!r}, expected a table")
    rest = {key: value for key, value in table.items() if key != "compare"}
    made = TableReader({}).read(PlanSettings, rest, "plan")
    return replace(made, compare=tuple(_make_axis(name, values) for name, values in axes.items()))


def read_axis(text: str) -> Axis:
    """Read `gpu=a40,l40s`, or any setting of a scenario by its dotted name.

    ``ConfigError`` if there is no `=`, no value, or the name is no setting.
    """
    label, equals, values = text.partition("=")
    words = [word.strip() for word in values.split(",")]
    if not equals or not label.strip():
        raise ConfigError(f"Got --compare {text!r}, expected something like gpu=a40,l40s")
    return _make_axis(label.strip(), [read_setting(f"value={word}")[1] for word in words])


def _make_axis(label: str, values: object) -> Axis:
    """Return an axis, by a short name or the dotted name of a setting.

    ``ConfigError`` if the name is no setting, or a value is missing.
    """
    if label not in SHORT and "." not in label:
        raise ConfigError(f"Got {label!r} to compare, expected one of {', '.join(SHORT)}, or a setting's dotted name")
    if not isinstance(values, list) or not values or "" in values:
        raise ConfigError(f"Got {label} = {values!r} to compare, expected at least one value")
    return Axis(label, SHORT.get(label, label), tuple(values))


def variants(table: Mapping[str, Any], axes: Sequence[Axis]) -> list[Variant]:
    """Return every combination of the axes' values; the scenario as it is where there is no axis.

    ``ConfigError`` if a setting cannot be changed, has two axes, or is what a profile takes the place of.
    """
    keys = [axis.key for axis in axes]
    is_measured = "profile" in table.get("setup", {}) or "setup.profile" in keys
    for axis in axes:
        if keys.count(axis.key) > 1:
            raise ConfigError(f"Got {axis.label} to compare twice, expected all of its values together")
        if is_measured and axis.key in MEASURED:
            raise ConfigError(f"Got {axis.label} to compare beside a profile, which is of one model on one machine")
    made = []
    for values in product(*(axis.values for axis in axes)):
        changed = dict(table)
        for axis, value in zip(axes, values, strict=True):
            changed = with_setting(changed, axis.key, value)
        labels = {axis.label: str(value) for axis, value in zip(axes, values, strict=True)}
        made.append(Variant(labels, changed))
    return made


def adapters_in(folder: Path) -> dict[str, Any]:
    """Return the adapters in a folder as a table `workload.adapters`: their number, ranks and modules.

    An adapter with several ranks counts with its largest. ``ConfigError`` if there is none, or the modules of one are
    given by an expression; ``AdapterError`` if one cannot be read.
    """
    homes = sorted(config.parent for config in folder.glob(f"*/{CONFIG_FILE}"))
    if not homes:
        raise ConfigError(f"No adapter in {folder}: expected folders with an {CONFIG_FILE}")
    ranks: list[int] = []
    targets: dict[str, None] = {}  # in order of appearance
    for home in homes:
        settings = parse_lora(home.name, read_config(open_folder(home.name, home)))
        ranks.append(max([settings.r, *(rank for _, rank in settings.rank_pattern)]))
        modules = ALL_LINEAR if settings.target_modules == "all-linear" else settings.target_modules
        if isinstance(modules, str):
            raise ConfigError(f"{home}: its modules are given by an expression ({modules}), expected names")
        named = [*modules, *settings.target_parameters]
        targets.update(dict.fromkeys(module.rpartition(".")[2] for module in named))
    return {"count": len(ranks), "ranks": ranks, "targets": list(targets)}
