"""An experiment as data: its cases, the published claims, and their tolerances.

A *suite* is a folder with a ``suite.toml`` (the set-up that its experiments share) and a file for each experiment::

    suite.toml     title, slo_s, warm_up_s, [workload], [setups.NAME]
    fig11.toml     title, source, use (names of setups), [sweep], [[sweep]] or [[points]], [[plots]], [[claims]], why

An experiment runs every setup at every point, with every seed; several sweeps make a point of every combination. A
*point* changes keys of the workload and of the setups by their dotted names; a table that brings a ``kind`` replaces
the one it changes, any other is merged into it. A setup may be ``like`` another. Claims or plots that differ in little
are rows of one entry, in its list ``each``. All of it ends as a list of cases (``cases.py``); nothing is run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.lab.tables import same_key

__all__ = ["Claim", "Experiment", "Plot", "Point", "Table", "merge", "setup_table"]

Table = dict[str, object]  # a table as TOML gives it


@dataclass(frozen=True, slots=True)
class Point:
    """One place on the horizontal axis."""

    label: str  # name in tables, to which claims refer
    x: float
    changes: Table  # settings by dotted names that begin with ``workload.`` or ``setup.``


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture: ``lines`` of a figure over the points, ``bars`` by point, or ``curves`` that each run kept."""

    kind: Literal["lines", "bars", "curves"] = "lines"
    show: str = option(help="Name of the figure or of the curve.")
    at: tuple[str, ...] = option((), help="Points to draw; all by default.")
    setups: tuple[str, ...] = option((), help="Setups to draw; all by default.")
    versus: str | None = option(None, help="Divide by this setup at the same point.")
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log: bool = option(False, help="Whether the vertical axis is logarithmic.")
    limit: float | None = option(None, help="A horizontal line.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that was published, how ours is made, and how near is near.

    The ``form`` is the compared quantity:

    * ``value``: the figure itself; ``at-most`` and ``at-least``: the same, published as a limit;
    * ``change``: relative to another setup, less 1; ``change-at-most``: the same, as a limit;
    * ``ratio``: relative to another setup;
    * ``overhead``: as ``change``, of what both exceed a third setup by, the ``bound``;
    * ``crossing``: where on the axis the figure first exceeds ``limit``;
    * ``crossing-ratio``: the crossing, relative to another setup's;
    * ``order``: setups in rising order of the figure; published is 1, ours the share of pairs in order.

    With ``relative``, shares of the place where ``versus`` crosses ``limit``, figures are interpolated between points,
    and the mean over the shares is compared.
    """

    text: str
    figure: str
    form: Literal[
        "value",
        "at-most",
        "at-least",
        "change",
        "change-at-most",
        "ratio",
        "overhead",
        "crossing",
        "crossing-ratio",
        "order",
    ] = "value"
    setup: str = ""
    point: str = option("", help="Where, by label, unless ``relative`` says.")
    relative: tuple[float, ...] = ()
    versus: str | None = option(None, help="The setup to compare with.")
    versus_point: str | None = option(None, help="The point to compare with, where it is another point.")
    bound: str | None = option(None, help="The setup of no overhead.")
    limit: float | None = option(None, help="The limit of a crossing.")
    order: tuple[str, ...] = option((), help="Setups in the published order, at ``point`` or as ``setup@label``.")
    published: float
    tolerance: float = option(help="Largest difference of two figures that agree, in the claim's unit.")
    unit: Literal["", "%", "x", "s", "ms", "req/s", "tok/s", "1/s"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(CheckedOptions):
    """One published figure or table, ready to be run; its tables of setups and of the workload are complete."""

    name: str = option(help="``suite/file``.")
    title: str
    source: str = ""
    calculation: str | None = option(None, help="Name in ``calculations.py``, where nothing has to be simulated.")
    setups: Mapping[str, Table]
    workload: Mapping[str, object]
    points: tuple[Point, ...] = ()
    num_seeds: int = option(3, at_least=1, help="Runs of each case.")
    slo_s: float = option(5.0, at_least=0, unit="s", help="Limit on the time to first token.")
    warm_up_s: float = option(0.0, at_least=0, unit="s", help="Requests that arrive this early are not counted.")
    plots: tuple[Plot, ...] = ()
    claims: tuple[Claim, ...] = ()
    shown: tuple[str, ...] = option(("ttft_p50", "ttft_p99"), help="Figures of the table of results.")
    why: str = option("", help="Why ours differs, where it does, and what shows that.")
    notes: str = option("", help="Remarks on the method.")
    is_ablation: bool = option(False, help="Whether it asks what it would take, so that its claims make no verdict.")
    first_seed: int = option(
        0, at_least=0, help="The first of the seeds, which follow each other; not one that constants were found on."
    )
    slo_tpot_s: float | None = option(
        None, at_least=0, unit="s", help="Limit on the mean time per token after the first; ``None`` for no limit."
    )
    versus: str | None = option(None, help="The setup that a second table compares all others with, seed by seed.")


def merge(table: Mapping[str, object], changes: Mapping[str, object]) -> Table:
    """Return a table with changes merged in, deeply; a table that brings a ``kind`` replaces its like."""
    merged: Table = deepcopy(dict(table))
    for name, value in changes.items():
        key = same_key(merged, name)
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and "kind" not in value:
            merged[key] = merge(old, value)
        else:
            merged[key] = deepcopy(value)
    return merged


def setup_table(setups: Mapping[str, Table], name: str, seen: tuple[str, ...] = ()) -> Table:
    """Return a setup's table, merged over the tables of the setups that its key ``like`` names.

    ``ConfigError`` if there is no such setup, or setups are like each other in a circle.
    """
    if name not in setups:
        raise ConfigError(f"Got setup {name!r}, expected one of {', '.join(sorted(setups))}")
    if name in seen:
        raise ConfigError(f"Got setups that are like each other in a circle: {', '.join((*seen, name))}")
    table = dict(setups[name])
    like = table.pop("like", None)
    return merge(setup_table(setups, str(like), (*seen, name)), table) if like is not None else table
