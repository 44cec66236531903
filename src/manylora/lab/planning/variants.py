"""Variants of one scenario: every combination of the compared settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from manylora.core.adapters.folder import CONFIG_FILE, read_config
from manylora.core.adapters.lora.settings import parse_lora
from manylora.core.adapters.sources import open_folder
from manylora.core.errors import ConfigError
from manylora.lab.sim.scenario import read_setting, with_setting

__all__ = ["SHORT", "Axis", "Variant", "adapters_in", "make_axis", "read_axis", "variants"]

SHORT = {
    "adapters": "workload.adapters.count",
    "eviction": "setup.adapters.eviction",
    "gpu": "setup.hardware",
    "hardware": "setup.hardware",
    "kernel": "setup.lora_kernel",
    "model": "setup.model",
    "policy": "setup.scheduler.policy",
    "tp": "setup.tensor_parallel",
}
"""Short names of settings that are often compared."""

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and the values it takes.

    Args:
        label: The name in the command.
        key: The dotted name of the setting.
    """

    label: str
    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination: its values by label, and the scenario's table with these values."""

    settings: dict[str, str]
    table: dict[str, Any]


def read_axis(text: str) -> Axis:
    """Read `gpu=a40,l40s`, or any setting of a scenario by its dotted name.

    Raises:
        ConfigError: There is no `=`, no value, or the name is no setting.
    """
    label, equals, values = text.partition("=")
    words = [word.strip() for word in values.split(",")]
    if not equals or not label.strip():
        raise ConfigError(f"Got --compare {text!r}, expected something like gpu=a40,l40s")
    return make_axis(label.strip(), [read_setting(f"value={word}")[1] for word in words])


def make_axis(label: str, values: object) -> Axis:
    """Return an axis.

    Args:
        label: A short name, or the dotted name of a setting.
        values: A list of values.

    Raises:
        ConfigError: The name is no setting, or a value is missing.
    """
    if label not in SHORT and "." not in label:
        raise ConfigError(f"Got {label!r} to compare, expected one of {', '.join(SHORT)}, or a setting's dotted name")
    if not isinstance(values, list) or not values or "" in values:
        raise ConfigError(f"Got {label} = {values!r} to compare, expected at least one value")
    return Axis(label, SHORT.get(label, label), tuple(values))


def variants(table: Mapping[str, Any], axes: Sequence[Axis]) -> list[Variant]:
    """Return every combination of the axes' values; the scenario as it is where there is no axis.

    Raises:
        ConfigError: A setting cannot be changed.
    """
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

    An adapter with several ranks counts with its largest.

    Raises:
        ConfigError: There is none, or the modules of one are given by an expression.
        AdapterError: One cannot be read.
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
        targets.update(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    return {"count": len(ranks), "ranks": ranks, "targets": list(targets)}
