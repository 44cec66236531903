"""Experiments as data: every one that ships can be read, and a made-up suite runs, is kept, and is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import app
from typer.testing import CliRunner

from manylora.core.errors import ConfigError
from manylora.lab.costs.idle import times_on_idle_engine
from manylora.lab.experiments.calculations import CALCULATIONS, is_clairvoyant
from manylora.lab.experiments.cases import Result, _digest, cases_of, prepare, read_workload
from manylora.lab.experiments.findings import Findings, Verdict, compare, overall
from manylora.lab.experiments.isolated import is_isolated, read_functions, run_isolated
from manylora.lab.experiments.pictures import draw
from manylora.lab.experiments.read import find_experiments, read_experiment
from manylora.lab.experiments.report import as_json, as_markdown, format_figure, format_published
from manylora.lab.experiments.running import Runner
from manylora.lab.experiments.simulated import run_case
from manylora.lab.experiments.spec import Claim, Experiment, Plot, Point, merge, setup_table
from manylora.lab.measure import percentiles
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.tables import TableReader
from manylora.lab.workloads import RequestSpec, Workload, make_workload

SUITE = """
slo_s = 0.5
warm_up_s = 2.0
num_seeds = 2
[workload]
duration_s = 20.0
[workload.arrivals]
kind = "poisson"
rate = 4.0
[workload.lengths]
kind = "parametric"
prompt = { kind = "fixed", tokens = 64 }
output = { kind = "fixed", tokens = 8 }
[workload.adapters]
count = 4
ranks = [16]
[setups.slow]
model = "llama-7b"
hardware = "a40"
copies = "s-lora"
[setups.quick]
like = "slow"
hardware = "h100"
"""

EXPERIMENT = """
title = "Faster devices are faster"
source = "Nobody"
shown = ["ttft_p50", "hit_rate"]
use = ["slow", "quick"]
[sweep]
key = "workload.arrivals.rate"
values = [2, 6]
[[plots]]
kind = "lines"
show = "ttft_p50"
[[plots]]
kind = "curves"
show = "ttft_cdf"
[[plots]]
kind = "bars"
show = "ttft_p50"
versus = "slow"
[[claims]]
text = "quick before slow"
figure = "ttft_p50"
form = "order"
order = ["quick@6", "slow@6"]
published = 1.0
tolerance = 0.0
[[claims]]
text = "by a tenth"
figure = "ttft_p50"
form = "change"
setup = "quick"
versus = "slow"
point = "6"
published = -0.1
tolerance = 0.01
unit = "%"
[[claims]]
text = "the SLO breaks at 3"
figure = "ttft_p99"
form = "crossing"
setup = "slow"
limit = 100.0
published = 3.0
tolerance = 1.0
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    (tmp_path / "suite.toml").write_text(SUITE)
    (tmp_path / "speed.toml").write_text(EXPERIMENT)
    return tmp_path


def find(experiment: Experiment, folder: Path | None) -> Findings:
    cases = cases_of(experiment, seeds=2, traces=None)
    results = Runner(folder).run(cases.values())
    places: dict[tuple[str, str], list[Result]] = {}
    for (setup, point, _), case in cases.items():
        places.setdefault((setup, point), []).append(results[case.key])
    return Findings(experiment, places)


@pytest.mark.parametrize("name", find_experiments())
def test_what_ships_can_be_run(name, tmp_path):
    """Setups and workloads are complete."""
    experiment = read_experiment(name)
    for trace in (
        "AzureLLMInferenceTrace_conv.csv",
        "gentd26_lora_lru_stack_distance.csv",
        "gentd26_data_trace_processed.csv.gz",
        "azure_functions_2019_sample1000_invocations.csv.gz",
    ):
        (tmp_path / trace).touch()
    for case in cases_of(experiment, seeds=1, traces=tmp_path).values():
        if is_isolated(case):
            assert read_functions(case.setup).models
        else:
            assert (
                is_clairvoyant(case)
                or make_config(TableReader({}).read(Setup, case.setup, "setup")).scheduler.max_num_seqs
            )
        assert read_workload(case.workload, tmp_path).adapters.count


def test_an_experiment_is_run_once_kept_and_judged(catalog, tmp_path):
    experiment = read_experiment(str(catalog / "speed.toml"))
    runs = tmp_path / "runs"
    findings = find(experiment, runs)
    kept = sorted(runs.iterdir())
    assert len(kept) == 8, "two setups, two loads, two seeds"
    kept[0].write_text(kept[0].read_text().replace('"errors":0', '"errors":7'))
    again = find(experiment, runs)
    errors = [run.figures["errors"] for setup in ("slow", "quick") for x in "26" for run in again.runs(setup, x)]
    assert sorted(errors) == [0, 0, 0, 0, 0, 0, 0, 7], "what is kept is not run again"

    comparisons = findings.compare()
    assert [one.verdict for one in comparisons] == [Verdict.AGREES, Verdict.DIRECTION, Verdict.NOT_REACHED]
    assert comparisons[1].ours is not None
    assert comparisons[1].ours.low <= comparisons[1].ours.middle <= comparisons[1].ours.high < -0.1
    assert overall(comparisons) is Verdict.NOT_REACHED

    assert all(draw(findings, plot).startswith(b"\x89PNG") for plot in experiment.plots)
    markdown = as_markdown([(findings, ["made-up"])], "command")
    for text in ("agrees in direction, not in amount", "not reached", "Faster devices are faster", "![made-up]"):
        assert text in markdown
    assert json.loads(json.dumps(as_json(findings)))["claims"][0]["verdict"] == "agrees"


def test_changing_what_is_run_changes_its_key(catalog):
    experiment = read_experiment(str(catalog / "speed.toml"))
    cases = list(cases_of(experiment, seeds=2, traces=None).values())
    assert len({case.key for case in cases}) == len(cases)
    assert cases[0].key == next(iter(cases_of(experiment, seeds=1, traces=None).values())).key


@pytest.mark.parametrize(("setting", "name"), [("hardware", "ours.toml"), ("model", "ours/config.json")])
def test_changing_a_file_of_the_setup_changes_the_key(catalog: Path, tmp_path: Path, setting: str, name: str) -> None:
    case = next(iter(cases_of(read_experiment(str(catalog / "speed.toml")), seeds=1, traces=None).values()))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    case = replace(case, setup={**case.setup, setting: str(file if setting == "hardware" else file.parent)})
    keys = [case.key]
    for content in ("first", "other"):
        file.write_text(content)
        _digest.cache_clear()  # a command reads a file once
        keys.append(case.key)
    assert len(set(keys)) == 3


def test_points_change_tables_by_their_names():
    table = {"a": {"b": 1, "c": {"kind": "x", "d": 2}}}
    assert merge(table, {"a": {"c": {"d": 3}}}) == {"a": {"b": 1, "c": {"kind": "x", "d": 3}}}
    assert merge(table, {"a": {"c": {"kind": "y"}}}) == {"a": {"b": 1, "c": {"kind": "y"}}}
    assert table["a"]["b"] == 1
    setups = {"one": {"like": "two", "x": 1}, "two": {"x": 2, "y": {"z": 3}}}
    assert setup_table(setups, "one") == {"x": 1, "y": {"z": 3}}
    with pytest.raises(ConfigError, match="circle"):
        setup_table({"one": {"like": "two"}, "two": {"like": "one"}}, "one")


SPREAD = """num_requests = 10
lengths.prompt = { kind = "uniform", low = 20, high = 900 }
"""


def made_findings(claim: Claim, figures: dict[str, list[float]]) -> Findings:
    """Return findings with one figure, by setup and point."""
    points = tuple(Point(str(x), float(x), {}) for x in range(1, 1 + len(next(iter(figures.values())))))
    experiment = Experiment(
        name="a/b",
        title="",
        source="",
        calculation=None,
        setups={name: {} for name in figures},
        workload={},
        points=points,
        num_seeds=1,
        slo_s=1.0,
        warm_up_s=0.0,
        plots=(),
        claims=(claim,),
        shown=("y",),
        why="",
        notes="",
    )
    results = {
        (name, point.label): [Result({"y": value})]
        for name, values in figures.items()
        for point, value in zip(points, values, strict=True)
    }
    return Findings(experiment, results)


def ours(claim: Claim, **figures: list[float]) -> float | None:
    (comparison,) = made_findings(claim, figures).compare()
    return None if comparison.ours is None else comparison.ours.middle


def test_crossings_are_where_a_figure_exceeds_the_limit():
    claim = Claim(
        text="", figure="y", form="crossing-ratio", setup="a", versus="b", limit=4.0, published=1.0, tolerance=0.1
    )
    # In logarithms half way from 2 to 8; and at the second point.
    assert ours(claim, a=[2, 8, 9], b=[1, 2, 8]) == pytest.approx(1.5 / 2.5)
    assert ours(claim, a=[1, 2, 3], b=[1, 2, 8]) is None, "never"
    assert ours(claim, a=[5, 6, 7], b=[1, 2, 8]) is None, "from the first point on"


def test_an_overhead_is_what_exceeds_the_bound():
    claim = Claim(
        text="",
        figure="y",
        form="overhead",
        setup="a",
        versus="b",
        bound="c",
        point="1",
        published=-0.5,
        tolerance=0.1,
    )
    assert ours(claim, a=[3], b=[6], c=[2]) == pytest.approx(-0.75)
    assert ours(claim, a=[3], b=[2], c=[2]) is None, "no overhead to halve"


def test_a_relative_load_is_a_share_of_where_the_other_crosses():
    claim = Claim(
        text="",
        figure="y",
        form="change",
        setup="a",
        versus="b",
        relative=(0.8,),
        limit=4.0,
        published=-0.5,
        tolerance=0.01,
    )
    # b crosses at 2.5, so at 2.0: a has 1, b has 2.
    assert ours(claim, a=[1, 1, 1], b=[1, 2, 8]) == pytest.approx(-0.5)
    several = replace(claim, relative=(0.4, 0.8))
    # And at 1.0 both have 1: the mean of no change and of a half.
    assert ours(several, a=[1, 1, 1], b=[1, 2, 8]) == pytest.approx(-0.25)
    assert ours(several, a=[5, 5, 5], b=[5, 6, 8]) is None, "it crosses nowhere"


@pytest.mark.parametrize("form", ["value", "at-most", "change", "ratio", "order"])
def test_a_figure_that_runs_do_not_have_is_nothing_to_compare(form: str) -> None:
    """Neither 0, which may be what was published, nor a figure of another setup."""
    order = ("a@1", "a@2") if form == "order" else ()
    claim = Claim(
        text="", figure="z", form=form, setup="a", versus="b", point="1", order=order, published=0.0, tolerance=1.0
    )
    findings = made_findings(claim, {"a": [1.0, 2.0], "b": [1.0, 2.0]})
    (comparison,) = findings.compare()
    assert comparison.verdict is Verdict.NOT_REACHED
    assert format_figure(findings.figure("a", "1", "z")) == "-"
    assert draw(findings, Plot(show="z"))


def test_nothing_is_a_share_of_nothing():
    claim = Claim(text="", figure="y", form="change", setup="a", versus="b", point="1", published=0.5, tolerance=0.1)
    assert ours(claim, a=[0.5], b=[0.0]) is None


@pytest.mark.parametrize("where", ["workload", "point", "nowhere"])
def test_a_report_names_the_traces_that_its_commands_need(where: str) -> None:
    claim = Claim(text="", figure="y", setup="a", point="1", published=0.5, tolerance=0.1)
    findings, lengths = made_findings(claim, {"a": [0.5]}), {"lengths": {"kind": "trace", "file": "x.csv"}}
    if where == "workload":
        findings.experiment = replace(findings.experiment, workload=lengths)
    elif where == "point":
        points = (Point("1", 1.0, {"workload.lengths": lengths["lengths"]}),)
        findings.experiment = replace(findings.experiment, points=points)
    traces = "" if where == "nowhere" else " --traces DIR"
    assert f"`manylora experiment run a/b{traces} --seeds 1`" in as_markdown([(findings, [])], "command")


def test_percentiles_of_a_calculation_are_those_of_runs(catalog: Path) -> None:
    (catalog / "alone.toml").write_text(f'title = "Alone"\ncalculation = "alone"\nuse = ["slow"]\n[workload]\n{SPREAD}')
    case = next(iter(cases_of(read_experiment(str(catalog / "alone.toml")), seeds=1, traces=None).values()))
    workload, versions, config = prepare(case)
    e2e = [one.e2e_s for one in times_on_idle_engine(workload.requests, versions, config.cost)]
    found = percentiles(e2e)
    assert found is not None and len(set(e2e)) > 2
    figures = CALCULATIONS["alone"](case).figures
    assert (figures["e2e_p50"], figures["e2e_p99"]) == pytest.approx((found.p50, found.p99), rel=1e-9)


def test_a_limit_is_kept_up_to_the_limit_and_one_run_makes_no_verdict():
    claim = Claim(text="", figure="y", form="at-most", setup="a", point="1", published=0.08, tolerance=0.0, unit="%")
    assert format_published(claim) == "at most 8.0%"
    verdicts = [compare(claim, values).verdict for values in ([0.020, 0.021], [0.07, 0.09], [0.1, 0.1], [0.02])]
    assert verdicts == [Verdict.AGREES, Verdict.OPEN, Verdict.DIFFERS, Verdict.ONE_RUN]
    assert compare(claim, [0.02], is_drawn=False).verdict is Verdict.AGREES, "a calculation has no chance in it"
    (alone,) = made_findings(claim, {"a": [0.02]}).compare()
    assert overall([alone]) is Verdict.ONE_RUN


def test_other_limits():
    least = Claim(text="", figure="y", form="at-least", setup="a", point="1", published=5.0, tolerance=0.0, unit="s")
    assert format_published(least) == "at least 5 s"
    verdicts = [compare(least, values).verdict for values in ([4.0, 4.1], [5.0, 6.0], [5.9, 6.0])]
    assert verdicts == [Verdict.DIFFERS, Verdict.OPEN, Verdict.AGREES]
    change = replace(least, form="change-at-most", versus="b", published=-0.2, unit="%")
    assert format_published(change) == "at most -20.0%"
    assert ours(change, a=[3.0], b=[4.0]) == pytest.approx(-0.25)
    verdicts = [compare(change, values).verdict for values in ([-0.3, -0.29], [-0.3, 0.1], [0.1, 0.11])]
    assert verdicts == [Verdict.AGREES, Verdict.OPEN, Verdict.DIFFERS]


def test_a_claim_agrees_where_its_whole_interval_does():
    claim = Claim(text="", figure="y", form="ratio", setup="a", versus="b", published=2.0, tolerance=0.1, unit="x")
    verdicts = [
        compare(claim, values).verdict
        for values in ([2.0, 2.001], [1.95, 2.05], [1.5, 1.501], [0.5, 0.501], [0.5, 1.8])  # the last reaches beyond 2
    ]
    assert verdicts == [Verdict.AGREES, Verdict.OPEN, Verdict.DIRECTION, Verdict.DIFFERS, Verdict.OPEN]
    comparisons = [compare(claim, values) for values in ([2.0, 2.001], [1.95, 2.05], [1.5, 1.501])]
    assert overall(comparisons[:2]) is Verdict.OPEN
    assert overall(comparisons) is Verdict.DIRECTION


def claim(fields: str) -> str:
    return f"use = ['slow', 'quick']\n[[claims]]\ntext = 'it'\nfigure = 'y'\npublished = 1\ntolerance = 0\n{fields}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('titel = "x"', "did you mean 'title'"),
        ("[sweep]\nkey = 3", "expected a key of workload. or setup., and values"),
        ("[sweep]\nkey = 'workload.arrivals.rate'\nvalues = [1]\nlabel = ['a']", "did you mean 'labels'"),
        ("use = ['slow']\n[sweep]\nkey = 'workload.arrivals.rate'\nvalues = [1000000, 1000001]", "two points '1e.06'"),
        ("[[points]]\nlabel = 'x'\nchanges = {}", "'changes', which nothing reads"),
        ("[sweep]\nkey = 'setup.copies'\nvalues = ['x']\n[[points]]", "both sweep and points"),
        ("use = []", "no setup"),
        ("use = ['slow']\ncalculation = 'alon'", "did you mean 'alone'"),
        ("use = ['slow']\nversus = 'quick'", "versus: got 'quick'"),
        (claim("setup = 'slw'"), "setup: got 'slw', did you mean 'slow'"),
        (claim("setup = 'slow'\nversus = 'fast'"), "setup: got 'fast'"),
        (claim("setup = 'slow'\nform = 'overhead'\nbound = 'fast'"), "setup: got 'fast'"),
        (claim("setup = 'slow'\npoint = '7'"), "point: got '7'"),
        (claim("setup = 'slow'\nversus_point = '7'"), "point: got '7'"),
        (claim("setup = 'slow'\nform = 'crossing'"), "no limit"),
        (claim("form = 'order'\norder = ['slow']"), "expected two setups"),
        (claim("form = 'order'\norder = ['slow@2', 'quick@6']"), "point: got '2'"),
        ("use = ['slow']\n[[plots]]\nshow = 'ttft_p50'\nsetups = ['slw']", "did you mean 'slow'"),
        ("use = ['slow']\n[[plots]]\nshow = 'ttft_p50'\nat = ['7']", "point: got '7'"),
        ("[[claims]]\nfigure = 'y'", "no text"),
        (claim("setup = 'slow'\neach = ['2', '6']"), "each = .*expected tables"),
        (claim("setup = 'slow'\neach = [{}, {setup = 'slw'}]"), "setup: got 'slw', did you mean 'slow'"),
        ("use = ['slow', 'fast']", "expected one of quick, slow"),
        ("[[points]]\nset = {rate = 3}", "expected keys of workload. and setup."),
        ("num_seeds = 0", "num_seeds = 0, expected 1 or more"),
    ],
)
def test_mistakes_are_named(catalog, change, message):
    (catalog / "wrong.toml").write_text(change + "\n")
    with pytest.raises(ConfigError, match=message):
        read_experiment(str(catalog / "wrong.toml"))


def test_rows_of_an_entry_share_its_keys_and_may_say_them_anew(catalog: Path) -> None:
    rows = """
[[plots]]
show = "ttft_p99"
log = true
each = [{}, { show = "ttft_p50" }]
[[claims]]
figure = "ttft_p99"
setup = "slow"
tolerance = 0.1
each = [
    { text = "at 2", point = "2", published = 1.0 },
    { text = "at 6", point = "6", published = 2.0, tolerance = 0.2 },
]
[[claims]]
text = "alone"
figure = "ttft_p50"
setup = "quick"
published = 3.0
tolerance = 0.3
"""
    (catalog / "rows.toml").write_text(EXPERIMENT.partition("[[plots]]")[0] + rows)
    experiment = read_experiment(str(catalog / "rows.toml"))
    assert experiment.plots == (Plot(show="ttft_p99", log=True), Plot(show="ttft_p50", log=True))
    said = [(one.text, one.figure, one.setup, one.point, one.published, one.tolerance) for one in experiment.claims]
    assert said == [
        ("at 2", "ttft_p99", "slow", "2", 1.0, 0.1),
        ("at 6", "ttft_p99", "slow", "6", 2.0, 0.2),
        ("alone", "ttft_p50", "quick", "", 3.0, 0.3),
    ]


def test_a_name_that_is_not_there_is_nearly_found():
    with pytest.raises(ConfigError, match="did you mean 'chameleon/"):
        read_experiment("chameleon/fg11")


def test_a_missing_trace_is_named():
    result = CliRunner().invoke(app, ["experiment", "run", "chameleon/fig13", "--quick"])
    assert isinstance(result.exception, ConfigError)
    assert "AzureLLMInferenceTrace_conv.csv" in str(result.exception)


def test_the_command_lists_and_runs(tmp_path):
    runner = CliRunner()
    listed = runner.invoke(app, ["experiment", "list"])
    assert "chameleon/fig11" in listed.stdout
    options = ["--output", str(tmp_path / "out")]
    result = runner.invoke(app, ["experiment", "run", "multi-lora/kernels", *options])
    assert result.exit_code == 0, result.output
    assert "published" in result.stdout
    result = runner.invoke(app, ["experiment", "report", "multi-lora/kernels", *options])
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.md", "multi-lora-kernels.json", "multi-lora-kernels.png", "runs"} <= names


def test_alone_is_what_a_run_with_nobody_else_shows(catalog):
    """Priced step by step, or from four prices: the same."""
    experiment = read_experiment(str(catalog / "speed.toml"))
    spec = read_workload(experiment.workload, None)
    config = make_config(TableReader({}).read(Setup, experiment.setups["slow"], "setup"))
    adapters = make_workload(spec, 0).adapters
    request = RequestSpec(arrival_s=1.0, num_prompt_tokens=300, num_output_tokens=41, adapter=adapters[0].name)
    run = simulate(Workload(name="alone", requests=(request,), adapters=adapters), config)
    (alone,) = times_on_idle_engine([request], adapter_versions(adapters, config.base), config.cost)
    assert run.records[0].ttft_s == pytest.approx(alone.ttft_s, rel=1e-9)
    assert run.records[0].e2e_s == pytest.approx(alone.e2e_s, rel=1e-6)
    assert alone.load_s > 0
    assert alone.adapter_s > 0


def test_requests_for_the_base_are_no_cold_starts(catalog: Path) -> None:
    case = next(iter(cases_of(read_experiment(str(catalog / "speed.toml")), seeds=1, traces=None).values()))
    rates = {}
    for share in (0.0, 0.5, 1.0):
        adapters = {**case.workload["adapters"], "base_share": share}  # type: ignore[dict-item]
        case = replace(case, workload={**case.workload, "adapters": adapters}, warm_up_s=0.0)
        figures = run_case(case).figures
        rates[share] = figures["cold_starts_per_s"]
        assert ("hit_rate" in figures) is (share < 1.0)
    assert rates[0.0] > 0.0 == rates[1.0]
    assert 0.0 < rates[0.5] <= rates[0.0] * 1.01  # of each adapter the first alone


@pytest.mark.parametrize("why", ["warm-up", "refused"])
def test_a_run_whose_requests_have_no_latency_has_no_figure_of_one(catalog: Path, why: str) -> None:
    """Not one of 0 s, which would keep any limit."""
    case = next(iter(cases_of(read_experiment(str(catalog / "speed.toml")), seeds=1, traces=None).values()))
    refusing = {**case.setup, "max_model_len": 32}  # of prompts of 64 tokens
    case = replace(case, warm_up_s=99.0) if why == "warm-up" else replace(case, setup=refusing)
    figures = run_case(case).figures
    assert figures["errors"] == figures["requests"] and (figures["requests"] > 0) is (why == "refused")
    assert not any(name.startswith(("ttft", "tbt", "tpot", "e2e", "prefill", "slowdown")) for name in figures)
    assert figures["alone_e2e_mean"] > 0.0


def test_several_sweeps_make_a_point_of_every_combination(tmp_path):
    (tmp_path / "suite.toml").write_text(SUITE)
    sweeps = """
title = "Two sweeps"
use = ["slow", "quick"]
versus = "slow"
first_seed = 5
shown = ["ttft_p50", "squashed"]
[[sweep]]
key = "workload.arrivals.rate"
values = [2, 6]
[[sweep]]
key = "setup.adapters.look_ahead"
values = [0, 10]
labels = ["no look-ahead", "look-ahead"]
"""
    file = tmp_path / "two.toml"
    file.write_text(sweeps)
    experiment = read_experiment(str(file))
    assert [point.label for point in experiment.points] == [
        "2, no look-ahead",
        "2, look-ahead",
        "6, no look-ahead",
        "6, look-ahead",
    ]
    assert experiment.points[3].changes == {"workload.arrivals.rate": 6, "setup.adapters.look_ahead": 10}
    assert {seed for _, _, seed in cases_of(experiment, seeds=2, traces=None)} == {5, 6}
    figures = {"slow": (2.0, 8.0), "quick": (1.0, 4.0)}
    results = {
        (setup, point.label): [Result({"ttft_p50": value}) for value in values]
        for setup, values in figures.items()
        for point in experiment.points
    }
    findings = Findings(experiment, results)
    change = findings.change("quick", "2, look-ahead", "ttft_p50")
    assert (change.middle, change.low, change.high) == pytest.approx((-0.5, -0.5, -0.5))
    assert findings.change("quick", "2, look-ahead", "squashed") is None, "nothing to divide by"
    page = as_markdown([(findings, [])], "command")
    assert "Change against slow, seed by seed" in page
    assert "| quick | 6, look-ahead | -50% (-50% to -50%) | - |" in page
    file.write_text(sweeps.replace('"no look-ahead", ', ""))
    with pytest.raises(ConfigError, match="1 labels for 2 values"):
        read_experiment(str(file))


def test_a_case_of_functions_is_run_and_paid_for():
    """Functions are billed for all of their devices' time; one that is always on pays for it idle as well."""
    experiment = read_experiment("serverless/fig06")
    (case,) = [
        one
        for (setup, point, _), one in cases_of(experiment, seeds=1, traces=None, duration_s=900.0).items()
        if (setup, point) == ("serverless-lora", "normal")
    ]
    found = run_isolated(case).figures
    assert found["requests"] > 500
    assert found["ledger_error"] == 0.0
    assert 0.0 < found["cost_7b"] < found["cost"] == pytest.approx(found["cost_7b"] + found["cost_13b"], rel=1e-6)
    assert found["paid_devices"] + found["platform_devices"] == pytest.approx(16.0)
    assert found["ttft_mean_7b"] < found["e2e_mean_7b"] < found["e2e_mean_13b"]
    assert found["cold_mean"] + found["queue_mean"] + found["serving_mean"] == pytest.approx(found["e2e_mean"])
    with pytest.raises(ConfigError, match="hardware"):
        read_functions({"functions": {}, "hardware": "l40s"})
