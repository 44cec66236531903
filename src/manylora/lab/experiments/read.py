"""Read suites and experiments from their TOML files; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from manylora.core.errors import ConfigError
from manylora.core.options import nearest
from manylora.core.plugins import with_files_found
from manylora.lab.experiments.calculations import CALCULATIONS
from manylora.lab.experiments.spec import Claim, Experiment, Point, Table, merge, setup_table
from manylora.lab.tables import TableReader, read_table

__all__ = ["CATALOG", "find_experiments", "read_experiment"]

CATALOG = Path(__file__).parent / "catalog"  # suites that come with manylora

SUITE = "suite.toml"
CHANGED = ("workload.", "setup.")  # beginnings of the keys that points change
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

    ``ConfigError`` if there is no such experiment, or a file is wrong.
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
    _check_keys(table, known, path.name)
    return table


def _check_keys(table: Table, known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: got {key!r}, which nothing reads: {nearest(key, known)}")


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
        "claims": _rows(own, "claims"),
        "plots": _rows(own, "plots"),
    }
    experiment = replace(TableReader({}).read(Experiment, settings | made, "experiment"), points=_points(own))
    _check_names(experiment)
    return experiment


def _rows(own: Table, key: str) -> list[Table]:
    """Return a table for each claim or plot; an entry with ``each`` says what its rows, one of them each, share."""
    rows = []
    for table in _tables(own, key):
        shared = {name: value for name, value in table.items() if name != "each"}
        rows += [{**shared, **row} for row in _tables(table, "each")] or [shared]
    return rows


def _check_names(experiment: Experiment) -> None:
    """Raise ``ConfigError`` where claims or plots speak of setups or points that there are not, or say too little."""
    setups, labels = experiment.setups, [point.label for point in experiment.points]
    if not setups:
        raise ConfigError("Got no setup, expected one at least")
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"Got two points {twice!r}, expected a label for each (labels = [...])")
    if experiment.calculation is not None:
        _find(experiment.calculation, CALCULATIONS, "calculation")
    _find(experiment.versus, setups, "versus")
    for claim in experiment.claims:
        where = f"claim {claim.text!r}"
        for setup, point in _places(claim):
            _find(setup, setups, f"{where}: setup")
            _find(point or None, labels, f"{where}: point")
        if claim.limit is None and (claim.form.startswith("crossing") or claim.relative):
            raise ConfigError(f"{where}: no limit, which it needs")
    for plot in experiment.plots:
        for setup in (*plot.setups, plot.versus):
            _find(setup, setups, f"plot of {plot.show}: setup")
        for label in plot.at:
            _find(label, labels, f"plot of {plot.show}: point")


def _places(claim: Claim) -> list[tuple[str | None, str | None]]:
    """Return the setups and labels of points that a claim speaks of."""
    if claim.form != "order":
        others = [(claim.versus, claim.versus_point), (claim.bound, None)]
        return [(claim.setup, claim.point), *others]
    places = [one.partition("@") for one in claim.order]
    if len(places) < 2:
        raise ConfigError(f"claim {claim.text!r}: got order = {list(claim.order)}, expected two setups at least")
    return [(setup, point or claim.point) for setup, _, point in places]


def _find(name: str | None, known: Collection[str], what: str) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"{what}: got {name!r}, {nearest(name, known)}")


def _points(own: Table) -> tuple[Point, ...]:
    """Return the axis: the points that are given, or the product of the sweeps; one that changes nothing else."""
    if "sweep" in own and "points" in own:
        raise ConfigError("Got both sweep and points, expected one of them")
    if "sweep" in own:
        return tuple(map(_combined, enumerate(product(*map(_swept, _tables(own, "sweep"))))))
    points = []
    for place, table in enumerate(_tables(own, "points")):
        _check_keys(table, ("label", "x", "set"), "points")
        label, changes = str(table.get("label", place)), table.get("set", {})
        if not isinstance(changes, dict) or not all(key.startswith(CHANGED) for key in changes):
            raise ConfigError(f"Got point {label!r} that sets {changes!r}, expected keys of workload. and setup.")
        points.append(Point(label, _x(table.get("x", place), place), dict(changes)))
    return tuple(points) or (Point("", 0.0, {}),)


def _swept(sweep: Table) -> list[Point]:
    """Return the points of one sweep: a key, its values, and a label for each value that does not speak for itself."""
    _check_keys(sweep, ("key", "values", "labels"), "sweep")
    key, values = str(sweep.get("key", "")), sweep.get("values")
    if not key.startswith(CHANGED) or not isinstance(values, list) or not values:
        raise ConfigError(f"Got sweep = {sweep!r}, expected a key of workload. or setup., and values")
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
