"""Descriptions of workloads: from TOML, and into requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from manylora.core.errors import ConfigError
from manylora.lab.workloads import AdapterSet, WorkloadSpec, make_workload, read_workload_spec
from manylora.lab.workloads.arrivals import PoissonArrivals, ReplayArrivals
from manylora.lab.workloads.lengths import (
    ExponentialTokens,
    FixedTokens,
    ParametricLengths,
    ReplayLengths,
    TraceLengths,
)
from manylora.lab.workloads.locality import Drift
from manylora.lab.workloads.popularity import RankShares, ZipfShares
from manylora.lab.workloads.spec import KINDS

SPEC = WorkloadSpec(
    num_requests=400,
    arrivals=PoissonArrivals(rate=8.0),
    lengths=ParametricLengths(prompt=ExponentialTokens(mean=100.0), output=ExponentialTokens(mean=30.0)),
    adapters=AdapterSet(count=20),
    popularity=ZipfShares(),
)

TOML = """
[workload]
name = "chameleon"
num_requests = 50

[workload.arrivals]
kind = "poisson"
rate = 8

[workload.lengths]
kind = "trace"
file = "trace.csv"
scale = 0.5
bounds = { max_output = 3 }

[workload.adapters]
count = 10
ranks = [8, 16]
targets = ["q_proj"]

[workload.popularity]
kind = "rank"
adapters = { kind = "power", alpha = 0.5 }

[workload.drift]
period_s = 3.0
top = 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = "".join(f"2023-11-16 18:15:4{second}.6805900,{100 * (second + 1)},{second + 1}\n" for second in range(5))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    (tmp_path / "workload.toml").write_text(TOML)
    return tmp_path


def test_a_seed_is_a_workload() -> None:
    assert make_workload(SPEC, 3) == make_workload(SPEC, 3)
    assert make_workload(SPEC, 3) != make_workload(SPEC, 4)


def test_changing_one_source_of_chance_leaves_the_others() -> None:
    def columns(spec: WorkloadSpec) -> dict[str, list[object]]:
        requests = make_workload(spec, 0).requests
        return {
            "arrivals": [one.arrival_s for one in requests],
            "prompt": [one.num_prompt_tokens for one in requests],
            "output": [one.num_output_tokens for one in requests],
            "adapters": [one.adapter for one in requests],
        }

    plain = columns(SPEC)
    lengths = ParametricLengths(prompt=ExponentialTokens(mean=100.0), output=FixedTokens(tokens=9))
    for changed, spec in (
        ("arrivals", replace(SPEC, arrivals=PoissonArrivals(rate=2.0))),
        ("output", replace(SPEC, lengths=lengths)),
        ("adapters", replace(SPEC, popularity=RankShares())),
        ("adapters", replace(SPEC, drift=Drift(period_s=5.0, top=4))),
    ):
        other = columns(spec)
        assert [name for name in plain if plain[name] != other[name]] == [changed]


def test_the_base_gets_its_share() -> None:
    workload = make_workload(replace(SPEC, num_requests=4000, adapters=AdapterSet(count=20, base_share=0.3)), 0)
    names = Counter(one.adapter is None for one in workload.requests)
    assert names[True] / 4000 == pytest.approx(0.3, abs=0.03)
    alone = make_workload(replace(SPEC, adapters=AdapterSet(count=0)), 0)
    assert alone.adapters == () and {one.adapter for one in alone.requests} == {None}


def test_ranks_take_turns() -> None:
    adapters = AdapterSet(count=12, ranks=(8, 16, 32)).specs()
    assert Counter(one.rank for one in adapters) == {8: 4, 16: 4, 32: 4}
    assert [one.name for one in adapters][:2] == ["adapter-00", "adapter-01"]


def test_toml_is_read_in_full(folder: Path) -> None:
    spec = read_workload_spec(folder / "workload.toml")
    assert isinstance(spec.arrivals, PoissonArrivals) and spec.arrivals.rate == 8.0
    assert isinstance(spec.lengths, TraceLengths) and spec.lengths.bounds.max_output == 3
    assert isinstance(spec.popularity, RankShares)
    assert spec.adapters == AdapterSet(count=10, ranks=(8, 16), targets=("q_proj",))
    assert spec.drift == Drift(period_s=3.0, top=4)
    workload = make_workload(spec, 0)
    assert workload.name == "chameleon" and len(workload.requests) == 50
    assert {one.num_prompt_tokens for one in workload.requests} == {50, 100, 150, 200, 250}


def test_traces_are_found_beside_the_file_or_in_a_given_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (folder / "trace.csv").rename(elsewhere / "trace.csv")
    assert read_workload_spec(folder / "workload.toml", traces=elsewhere).lengths.file == elsewhere / "trace.csv"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"workload\.lengths\.file = 'trace\.csv', which is not in"):
        read_workload_spec(folder / "workload.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rate = 8", "rat = 8", r"workload\.arrivals\.rat, which nothing reads: did you mean 'rate'"),
        ('kind = "poisson"', 'kind = "poison"', r"arrivals\.kind = 'poison', did you mean 'poisson'"),
        ('kind = "poisson"', 'kind = ["poisson"]', r"arrivals\.kind = \['poisson'\], did you mean 'poisson'"),
        ('kind = "poisson"\n', "", r"workload\.arrivals: no kind, expected one of azure-functions-2019"),
        ("rate = 8", "", r"workload\.arrivals: no rate"),
        ("rate = 8", "rate = -8", r"workload\.arrivals: Got rate = -8\.0"),
        ("rate = 8", 'rate = "8"', r"workload\.arrivals\.rate = '8', expected a number"),
        ("num_requests = 50", "num_requests = 1.5", r"num_requests = 1\.5, expected a whole number"),
        ("num_requests = 50", "num_requests = true", "expected a whole number"),
        ("ranks = [8, 16]", "ranks = 8", r"adapters\.ranks = 8, expected a list"),
        ("ranks = [8, 16]", 'ranks = [8, "x"]', r"adapters\.ranks\[1\] = 'x', expected a whole number"),
        ('["q_proj"]', '["q_proj", "q_proj"]', "expected at least one module, and each once"),
        ("ranks = [8, 16]", "ranks = [8, 0]", r"workload\.adapters: Got ranks = \(8, 0\)"),
        ("ranks = [8, 16]", "ranks = [100_000_000]", "Got ranks = .*each from 1 to 65536"),
        ("bounds = {", "pairing = 'row'\nbounds = {", r"lengths\.pairing = 'row', expected one of rows, independent"),
        ("alpha = 0.5", "alpha = 2.0", r"popularity\.adapters: Got alpha = 2\.0"),
        ("[workload.drift]", "[workload.trend]", r"workload\.trend, which nothing reads"),
        ("[workload.drift]", "[worload]", "got 'worload', which nothing reads: did you mean 'workload'"),
        ("[workload]", "[workload", "not TOML"),
    ],
)
def test_what_is_wrong_is_named_by_where_it_stands(folder: Path, old: str, new: str, message: str) -> None:
    assert old in TOML
    file = folder / "workload.toml"
    file.write_text(TOML.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_workload_spec(file)


def test_kinds_are_told_apart() -> None:
    for seam, kinds in KINDS.items():
        names = [one.kind for one in kinds]  # type: ignore[attr-defined]
        assert len(names) == len(set(names)), seam


def test_a_trace_can_be_replayed_whole(folder: Path) -> None:
    file = folder / "trace.csv"
    spec = WorkloadSpec(arrivals=ReplayArrivals(file=file, rate=2.0), lengths=ReplayLengths(file=file))
    requests = make_workload(spec, 0).requests
    assert [one.arrival_s for one in requests] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
    assert [one.num_output_tokens for one in requests] == [1, 2, 3, 4, 5]
