"""Read suites and experiments from their TOML files; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from manylora.core.errors import ConfigError
from manylora.core.options import nearest
from manylora.core.plugins import with_files_found
from manylora.lab.experiments.spec import Experiment, Point, Table, merge, setup_table
from manylora.lab.tables import TableReader, read_table

__all__ = ["CATALOG", "find_experiments", "read_experiment"]

CATALOG = Path(__file__).parent / "catalog"
"""Suites that come with manylora."""

SUITE = "suite.toml"
_OF_SUITE = ("title", "slo_s", "warm_up_s", "num_seeds", "workload", "setups")
_OF_EXPERIMENT = (
    *("suite", "title", "source", "calculation", "setups", "use", "workload", "sweep", "points", "num_seeds", "slo_s"),
    *("warm_up_s", "first_seed", "slo_tpot_s", "versus", "plots", "claims", "shown", "why", "notes", "ablation"),
)


def find_experiments() -> list[str]:
    """Return the names of the experiments that come with manylora, in the order they were published in."""
    found = [path for path in CATALOG.glob("*/*.toml") if path.name != SUITE]
    return [f"{path.parent.name}/{path.stem}" for path in sorted(found)]


def read_experiment(name: str) -> Experiment:
    """Read an experiment and the suite it belongs to.

    Args:
        name: ``suite/file`` of the catalog, or the path of your own file, which ends with ``.toml``. Such a file shares
            the settings of the suite that it names with ``suite``, else of a ``suite.toml`` beside it.

    Raises:
        ConfigError: There is no such experiment, or a file is wrong.
    """
    path, called = Path(name).expanduser(), name
    if path.suffix == ".toml":
        called = path.stem
    else:
        names = find_experiments()
        if name not in names:
            raise ConfigError(f"Got experiment {name!r}, {nearest(name, names)}")
        path = CATALOG / f"{name}.toml"
    try:
        own = with_files_found(_read(path, _OF_EXPERIMENT), [path.parent])
        suite = path.with_name(SUITE)
        if "suite" in own:
            suites = [found.parent.name for found in CATALOG.glob(f"*/{SUITE}")]
            if own["suite"] not in suites:
                raise ConfigError(f"Got suite = {own['suite']!r}, {nearest(str(own['suite']), suites)}")
            suite = CATALOG / str(own["suite"]) / SUITE
        has_no_suite = suite.parent == path.parent and not suite.exists()
        return _make(called, {} if has_no_suite else _read(suite, _OF_SUITE), own)
    except ConfigError as error:
        raise ConfigError(f"experiment {name}: {error}") from None


def _read(path: Path, known: tuple[str, ...]) -> Table:
    table = read_table(path)
    for key in table:
        if key not in known:
            raise ConfigError(f"{path.name}: got {key!r}, which nothing reads: {nearest(key, known)}")
    return table


def _make(name: str, suite: Table, own: Table) -> Experiment:
    setups = merge(_table(suite, "setups"), _table(own, "setups"))
    every = {key: setup for key, setup in setups.items() if isinstance(setup, dict)}
    used = _texts(own, "use") or list(_table(own, "setups"))
    settings = {key: value for key, value in {**suite, **own}.items() if key not in ("suite", "use", "sweep", "points")}
    if "ablation" in settings:
        settings["is_ablation"] = settings.pop("ablation")
    made = {
        "name": name,
        "title": own.get("title", name),
        "setups": {one: setup_table(every, one) for one in used},
        "workload": merge(_table(suite, "workload"), _table(own, "workload")),
    }
    return replace(TableReader({}).read(Experiment, settings | made, "experiment"), points=_points(own))


def _points(own: Table) -> tuple[Point, ...]:
    """Return the axis: the points that are given, or the product of the sweeps; one that changes nothing else."""
    if "sweep" in own:
        return tuple(map(_combined, enumerate(product(*map(_swept, _tables(own, "sweep"))))))
    points = []
    for place, table in enumerate(_tables(own, "points")):
        label, changes = str(table.get("label", place)), table.get("set", {})
        if not isinstance(changes, dict) or not all(key.startswith(("workload.", "setup.")) for key in changes):
            raise ConfigError(f"Got point {label!r} that sets {changes!r}, expected keys of workload. and setup.")
        points.append(Point(label, _x(table.get("x", place), place), dict(changes)))
    return tuple(points) or (Point("", 0.0, {}),)


def _swept(sweep: Table) -> list[Point]:
    """Return the points of one sweep: a key, its values, and a label for each value that does not speak for itself."""
    key, values = str(sweep.get("key", "")), sweep.get("values")
    if not key or not isinstance(values, list) or not values:
        raise ConfigError(f"Got sweep = {sweep!r}, expected a key and values")
    labels = _texts(sweep, "labels") or [f"{one:g}" if isinstance(one, int | float) else str(one) for one in values]
    if len(labels) != len(values):
        raise ConfigError(f"Got {len(labels)} labels for {len(values)} values of {key}, expected one for each")
    return [
        Point(label, _x(value, place), {key: value})
        for place, (label, value) in enumerate(zip(labels, values, strict=True))
    ]


def _combined(numbered: tuple[int, tuple[Point, ...]]) -> Point:
    place, parts = numbered
    changes = {key: value for part in parts for key, value in part.changes.items()}
    return Point(", ".join(part.label for part in parts), parts[0].x if len(parts) == 1 else float(place), changes)


def _x(value: object, place: int) -> float:
    return float(value) if isinstance(value, int | float) else float(place)


def _table(table: Table, key: str) -> Table:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"Got {key} = {value!r}, expected a table")
    return dict(value)


def _tables(table: Table, key: str) -> list[Table]:
    values = table.get(key, [])
    if isinstance(values, dict):
        return [values]
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ConfigError(f"Got {key} = {values!r}, expected tables")
    return values


def _texts(table: Table, key: str) -> list[str]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"Got {key} = {values!r}, expected texts")
    return values
