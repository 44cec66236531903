"""An experiment as data: its cases, the published claims, and their tolerances.

A *suite* is a folder with a ``suite.toml`` (the set-up that its experiments share) and a file for each experiment::

    suite.toml     title, slo_s, warm_up_s, [workload], [setups.NAME]
    fig11.toml     title, source, use (names of setups), [sweep], [[sweep]] or [[points]], [[plots]], [[claims]], why

An experiment runs every setup at every point, with every seed; several sweeps make a point of every combination. A
*point* changes keys of the workload and of the setups
by their dotted names; a table that brings a ``kind`` replaces the one it changes, any other is merged into it. A setup
may be ``like`` another. All of it ends as a list of cases (``cases.py``); nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

from manylora.core.errors import ConfigError
from manylora.core.options import require

__all__ = ["Claim", "Experiment", "Plot", "Point", "Table", "merge", "setup_table"]

Table = dict[str, object]
"""A table as TOML gives it."""


@dataclass(frozen=True, slots=True)
class Point:
    """One place on the horizontal axis.

    Args:
        label: Name in tables, to which claims refer.
        x: Its place on the x-axis.
        changes: Settings by dotted names that begin with ``workload.`` or ``setup.``.
    """

    label: str
    x: float
    changes: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture.

    Args:
        kind: ``lines`` of a figure over the points, ``bars`` by point, or ``curves`` that each run kept.
        show: Name of the figure or of the curve.
        at: Points to draw; all by default.
        setups: Setups to draw; all by default.
        versus: Divide by this setup at the same point.
        log: Whether the vertical axis is logarithmic.
        limit: A horizontal line.
    """

    kind: Literal["lines", "bars", "curves"] = "lines"
    show: str
    at: tuple[str, ...] = ()
    setups: tuple[str, ...] = ()
    versus: str | None = None
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log: bool = False
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that was published, how ours is made, and how near is near.

    Args:
        figure: Name of the figure it is about.
        form: The compared quantity:

            * ``value``: the figure itself; ``at-most`` and ``at-least``: the same, published as a limit;
            * ``change``: relative to another setup, less 1; ``change-at-most``: the same, as a limit;
            * ``ratio``: relative to another setup;
            * ``overhead``: as ``change``, of what both exceed a third setup by, the ``bound``;
            * ``crossing``: where on the axis the figure first exceeds ``limit``;
            * ``crossing-ratio``: that, relative to another setup;
            * ``order``: setups in rising order of the figure; published is 1, ours the share of pairs in order.
        point: Where, by label; ``relative`` instead gives shares of the place where ``versus`` crosses ``limit``.
        relative: See ``point``; figures are interpolated between points, and the mean over the shares is compared.
        versus: The setup to compare with.
        versus_point: The point to compare with, where it is another point.
        bound: The setup of no overhead; see ``form``.
        limit: The limit of a crossing; see ``form``.
        order: Setups in the published order, each at ``point`` unless it is written ``setup@label``.
        tolerance: Largest difference of two figures that agree, in the claim's unit.
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
    point: str = ""
    relative: tuple[float, ...] = ()
    versus: str | None = None
    versus_point: str | None = None
    bound: str | None = None
    limit: float | None = None
    order: tuple[str, ...] = ()
    published: float
    tolerance: float
    unit: Literal["", "%", "x", "s", "ms", "req/s", "tok/s", "1/s"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One published figure or table, ready to be run.

    Args:
        name: ``suite/file``.
        calculation: Name of a calculation (``calculations.py``) where nothing has to be simulated.
        setups: Complete tables of the setups that are compared, by name.
        workload: Complete table of the workload.
        num_seeds: Runs of each case.
        slo_s: Limit on the time to first token, in seconds.
        warm_up_s: Requests that arrive this early are not counted, in seconds.
        claims: The published figures.
        shown: Figures of the table of results.
        why: Why ours differs, where it does, and what shows that.
        notes: Remarks on the method.
        is_ablation: Whether it asks what it would take, so that its claims make no verdict.
        first_seed: The seeds are this one and those that follow; others than those that constants were found on.
        slo_tpot_s: Limit on the mean time per token after the first, in seconds; ``None`` for no limit.
        versus: The setup that a second table compares all others with, seed by seed; ``None`` for no such table.
    """

    name: str
    title: str
    source: str = ""
    calculation: str | None = None
    setups: Mapping[str, Table]
    workload: Mapping[str, object]
    points: tuple[Point, ...] = ()
    num_seeds: int = 3
    slo_s: float = 5.0
    warm_up_s: float = 0.0
    plots: tuple[Plot, ...] = ()
    claims: tuple[Claim, ...] = ()
    shown: tuple[str, ...] = ("ttft_p50", "ttft_p99")
    why: str = ""
    notes: str = ""
    is_ablation: bool = False
    first_seed: int = 0
    slo_tpot_s: float | None = None
    versus: str | None = None

    def __post_init__(self) -> None:
        require(self.num_seeds >= 1, "num_seeds", self.num_seeds, "at least 1")
        require(self.first_seed >= 0, "first_seed", self.first_seed, "at least 0")
        for name in ("slo_s", "slo_tpot_s", "warm_up_s"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "at least 0 seconds")


def merge(table: Mapping[str, object], changes: Mapping[str, object]) -> Table:
    """Return a table with changes merged in, deeply; a table that brings a ``kind`` replaces its like."""
    merged: Table = deepcopy(dict(table))
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and "kind" not in value:
            merged[key] = merge(old, value)
        else:
            merged[key] = deepcopy(value)
    return merged


def setup_table(setups: Mapping[str, Table], name: str, seen: tuple[str, ...] = ()) -> Table:
    """Return a setup's table, merged over the tables of the setups that its key ``like`` names.

    Raises:
        ConfigError: There is no such setup, or setups are like each other in a circle.
    """
    if name not in setups:
        raise ConfigError(f"Got setup {name!r}, expected one of {', '.join(sorted(setups))}")
    if name in seen:
        raise ConfigError(f"Got setups that are like each other in a circle: {', '.join((*seen, name))}")
    table = dict(setups[name])
    like = table.pop("like", None)
    return merge(setup_table(setups, str(like), (*seen, name)), table) if like is not None else table
