"""A case: one setup at one point with one seed, which is run, cached and shared between experiments; and its result.

A case is known by its content: what serves, the workload, the seed, and the bytes of the files that it reads: traces,
data sheets, models' configurations and custom policies. Experiments that need the same run share it, and an unchanged
case is not run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.plugins import source_of
from manylora.core.types import AdapterVersion
from manylora.lab.experiments.spec import Experiment, Point, Table, merge
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.tables import TableReader
from manylora.lab.workloads import Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.spec import KINDS

__all__ = ["Case", "Curve", "Result", "cases_of", "cdf", "prepare", "read_workload", "reads_traces"]

FORM = 1  # form of the results that are kept; another number makes every case run again
FILES = ("hardware", "model", "profile")  # keys of a setup whose values may be paths of files

SHARES = (*(index / 50 for index in range(50)), 0.99, 0.995, 1.0)
DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of an experiment: a system, its workload, and what counts as good."""

    setup: Table  # the simulated system, as the table ``[setup]`` of the experiment's file
    workload: Table  # its requests, as the table ``[workload]``
    seed: int  # seed of all random streams
    warm_up_s: float  # requests that arrive this early are not counted, in seconds
    slo_s: float  # limit on the time to first token, in seconds
    traces: Path | None  # folder of traces; ``None`` where the workload needs none
    calculation: str | None = None  # name of a calculation that replaces the simulation; ``None`` for a simulated run
    # Limit on the mean time per token after the first, in seconds; ``None`` for no limit.
    slo_tpot_s: float | None = None

    @property
    def key(self) -> str:
        """The key of the result: a hash of all inputs of the case."""
        read = {file: _digest(path) for file, path in self._files()}
        limits = [self.slo_s, self.slo_tpot_s]
        content = [FORM, self.setup, self.workload, self.seed, self.warm_up_s, limits, read, self.calculation]
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()

    def _files(self) -> Iterator[tuple[str, Path]]:
        for name in _files_in(self.workload):
            if self.traces is not None and (self.traces / name).is_file():
                yield name, self.traces / name
        for key, value in _texts(self.setup):
            source = Path(value) if key in FILES else source_of(value)
            if source is not None and source.is_dir():
                source /= "config.json"  # of a model
            if source is not None and source.is_file():
                yield value, source


def cases_of(
    experiment: Experiment, *, seeds: int, traces: Path | None, duration_s: float | None = None
) -> dict[tuple[str, str, int], Case]:
    """Return an experiment's cases by setup, label of the point, and seed, from its first one on.

    ``duration_s`` cuts workloads off, for a quick look.
    """
    cases = {}
    for name, setup in experiment.setups.items():
        for point in experiment.points:
            changed = _change({"setup": setup, "workload": experiment.workload}, point)
            workload = changed["workload"]
            assert isinstance(workload, dict)
            warm_up_s = experiment.warm_up_s
            if duration_s is not None:
                workload["duration_s"] = duration_s
                warm_up_s = min(warm_up_s, duration_s / 5)
            for seed in range(experiment.first_seed, experiment.first_seed + seeds):
                cases[name, point.label, seed] = Case(
                    setup=dict(changed["setup"]),  # type: ignore[call-overload]
                    workload=workload,
                    seed=seed,
                    warm_up_s=warm_up_s,
                    slo_s=experiment.slo_s,
                    traces=traces,
                    calculation=experiment.calculation,
                    slo_tpot_s=experiment.slo_tpot_s,
                )
    return cases


def _change(tables: Table, point: Point) -> Table:
    for key, value in point.changes.items():
        nested: object = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        assert isinstance(nested, dict)
        tables = merge(tables, nested)
    return tables


def reads_traces(experiment: Experiment) -> bool:
    """Whether a workload of an experiment names a file of the folder of traces."""
    workloads = [experiment.workload, *(_change({}, point).get("workload") for point in experiment.points)]
    return any(map(_files_in, workloads))


def read_workload(table: Mapping[str, object], traces: Path | None) -> WorkloadSpec:
    """Return a workload's description from its table.

    ``ConfigError`` if a key is unknown, a value wrong, or a trace is not in the folder.
    """
    missing = [name for name in _files_in(table) if traces is None or not (traces / name).is_file()]
    if missing:
        where = "no folder of traces was given (--traces)" if traces is None else "it is not in the folder of traces"
        raise ConfigError(f"This needs the trace {missing[0]}, and {where}")
    return TableReader(KINDS, [traces] if traces is not None else []).read(WorkloadSpec, table, "workload")


def prepare(case: Case) -> tuple[Workload, dict[str, AdapterVersion], SimulationConfig]:
    """Return a case's workload, its adapters by name, and the simulator's configuration.

    ``ConfigError`` if something in its description is wrong, or a trace is missing.
    """
    spec = read_workload(case.workload, case.traces)
    workload = make_workload(spec, case.seed)
    config = make_config(
        TableReader({}).read(Setup, case.setup, "setup"), targets=spec.adapters.targets, seed=case.seed
    )
    return workload, adapter_versions(workload.adapters, config.base), config


@dataclass(frozen=True, slots=True)
class Curve:
    """Points to draw a line through."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def to_json(self) -> list[list[float]]:
        """Return both columns, short."""
        return [[_short(value) for value in column] for column in (self.x, self.y)]


@dataclass(frozen=True, slots=True)
class Result:
    """A case, run."""

    figures: dict[str, float]  # numbers by name; times in seconds unless the name says otherwise, shares in [0, 1]
    curves: dict[str, Curve] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "figures": {name: _short(value) for name, value in self.figures.items()},
            "curves": {name: curve.to_json() for name, curve in self.curves.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, dict[str, list[list[float]]]]) -> Result:
        """Return what ``to_json`` made."""
        curves = {name: Curve(tuple(x), tuple(y)) for name, (x, y) in data["curves"].items()}
        return cls({name: float(value) for name, value in data["figures"].items()}, curves)  # type: ignore[arg-type]


def cdf(values: Iterable[float]) -> Curve:
    """Return the cumulative distribution of values as a curve: x is a value, y the share of values up to it."""
    found = np.fromiter(values, dtype=np.float64)
    if not len(found):
        return Curve((), ())
    return Curve(tuple(np.quantile(found, SHARES).tolist()), SHARES)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _texts(table: object) -> Iterator[tuple[str, str]]:
    """Yield each text in a tree of tables, with its key."""
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if isinstance(value, str):
            yield key, value
        else:
            yield from _texts(value)


def _files_in(table: object) -> list[str]:
    return [value for key, value in _texts(table) if key == "file"]


@lru_cache(maxsize=64)
def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
