"""Scenarios from files and options: what they become, and what a person sees who gets one wrong."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import simulator

from manylora.cli.app import main
from manylora.core.config import GIB
from manylora.core.errors import ConfigError
from manylora.lab.experiments.cases import cases_of
from manylora.lab.experiments.read import read_experiment
from manylora.lab.experiments.running import Runner
from manylora.lab.experiments.spec import merge
from manylora.lab.measure import summarise
from manylora.lab.measure.plots import can_plot
from manylora.lab.measure.tables import compare, figures, latencies, milliseconds
from manylora.lab.planning.settings import read_plan_settings
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.scenario import read_scenario, with_setting
from manylora.lab.sim.setup import Setup, make_config, read_dims
from manylora.lab.tables import read_table

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Return a folder with a small trace in the format of the large one."""
    rng = random.Random(0)
    rows = [f"2023-11-16 18:15:{i:02}.0,{rng.randint(10, 3000)},{rng.randint(5, 400)}" for i in range(60)]
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return tmp_path


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the program as the shell would; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["manylora", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


SCENARIOS = sorted(path for path in EXAMPLES.glob("*.toml") if "title" not in read_table(path))  # experiments have one


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_example_runs(path: Path, traces: Path):
    table = read_table(path)
    read_plan_settings(table.pop("plan", {}))
    scenario = read_scenario(table, folders=(traces,))
    scenario = replace(scenario, workload=replace(scenario.workload, num_requests=40, duration_s=None))
    run = simulate(scenario.make_workload(), scenario.make_config())
    assert all(record.error is None for record in run.records)


def test_names_become_sizes():
    whole, cut = make_config(Setup(model="llama-2-7b")), make_config(Setup(num_pages=100, max_model_len=99))
    assert whole.num_pages * whole.base.page.num_bytes == pytest.approx(27 * GIB, rel=0.1)
    assert (cut.num_pages, cut.base.max_model_len) == (100, 99)


def test_devices_that_share_a_replica_share_its_pages_and_its_time():
    """Llama-2-70B fits no A100 alone; on four, base, KV and adapters are split."""
    config = make_config(Setup(model="llama-2-70b", hardware="a100-80", tensor_parallel_size=4))
    weights, pool = 137e9, config.num_pages * config.base.page.num_bytes
    assert 4 * 80e9 * 0.9 - weights - 30e9 < pool < 4 * 86e9 * 0.9 - weights
    eight = make_config(Setup(model="llama-2-70b", hardware="a100-80", tensor_parallel_size=8))
    workload = read_scenario(read_table(EXAMPLES / "synthetic.toml")).make_workload()
    workload = replace(workload, requests=workload.requests[:20])
    four_s, eight_s = (simulate(workload, one).summary().e2e for one in (config, eight))
    assert four_s is not None
    assert eight_s is not None
    assert four_s.mean / 2 < eight_s.mean < four_s.mean


def test_a_config_json_is_a_model(tmp_path: Path):
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 300,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for path in (tmp_path, tmp_path / "config.json"):
        assert read_dims(str(path)).num_layers == 2
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        read_dims(str(tmp_path))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stup": {}}, "did you mean 'setup'"),
        ({}, "no workload, which it needs"),
        ({"seed": "one"}, "seed = 'one'"),
        ({"setup": {"modle": "x"}}, r"setup.modle.*did you mean 'model'"),
        ({"setup": {"scheduler": {"max_num_seqs": "many"}}}, r"setup.scheduler.max_num_seqs = 'many'"),
        ({"slo": {"ttft_s": [1]}}, r"slo.ttft_s"),
        ({"slo": {"ttft_s": -1.0}}, r"slo: Got ttft_s = -1\.0"),
        ({"slo": {"ttft_s": float("nan")}}, r"slo.ttft_s = nan, expected a finite number"),
        ({"setup": {"host_s": float("inf")}}, r"setup.host_s = inf, expected a finite number"),
        ({"setup": {"host_s": 10**400}}, r"setup.host_s = 10+, expected a finite number"),
        ({"seed": 0.5}, r"seed = 0\.5, expected a whole number"),
    ],
)
def test_what_is_wrong_is_named_by_where_it_stands(table: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        read_scenario(table)


def test_a_key_in_both_its_forms_is_refused_and_changed_in_either():
    table = read_table(EXAMPLES / "synthetic.toml")
    workload = table["workload"]
    both = {**table, "workload": {**workload, "num-requests": 7}}
    with pytest.raises(ConfigError, match=r"Got scenario.workload.num_requests and scenario.workload.num-requests"):
        read_scenario(both)
    changed = with_setting(table, "workload.num-requests", 7)
    assert read_scenario(changed).workload.num_requests == 7
    assert read_scenario(with_setting(both, "warm-up-s", 1) | {"workload": workload}).warm_up_s == 1
    assert merge({"num_requests": 5}, {"num-requests": 7}) == {"num_requests": 7}


def test_a_synthetic_service_needs_no_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert run_main(monkeypatch, "simulate", "--requests", "30", "--warm-up", "0", "--adapters", "7") == 0
    printed = capsys.readouterr().out
    assert "30 requests" in printed
    assert "7 adapters" in printed
    assert "time to first token" in printed


def test_options_win_over_the_file_and_results_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], traces: Path, tmp_path: Path
):
    folder = tmp_path / "out"
    file = str(EXAMPLES / "chameleon.toml")
    options = [
        "--traces",
        str(traces),
        "--output",
        str(folder),
        "--policy",
        "fifo",
        "--replicas",
        "2",
        "--warm-up",
        "0",
    ]
    options += ["--set", "workload.num_requests=50", "--set", "setup.scheduler.predictor=quantile", "--slo-ttft", "9"]
    assert run_main(monkeypatch, "simulate", file, *options) == 0
    results = json.loads((folder / "results.json").read_text())
    assert results["scenario"]["setup"]["scheduler"]["policy"] == "fifo"
    assert results["scenario"]["setup"]["scheduler"]["predictor"] == "quantile"
    assert results["scenario"]["slo"]["ttft_s"] == 9.0
    assert results["summary"]["num_requests"] == 50
    assert len(results["replicas"]) == 2
    records = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [record["request_id"] for record in records] == [str(index) for index in range(50)]
    assert "| time to first token |" in (folder / "table.md").read_text()
    if can_plot():
        pictures = {"latency.png", "memory-0.png", "memory-1.png", "queues-0.png", "queues-1.png"}
        assert pictures <= {path.name for path in folder.iterdir()}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.toml"], "nowhere.toml: cannot be read"),
        (["--policy", "lifo"], "'lifo'"),
        (["--model", "llama-9"], "'llama-9'"),
        (["--hardware", "abacus"], "'abacus'"),
        (["--model", "llama-2-70b"], "needs"),
        (["--router", "nearest"], "'nearest'"),
        (["--set", "workload"], "KEY=VALUE"),
        (["--set", "workload.lenghts.scale=2"], "did you mean 'lengths'"),
        (["--set", "seed.x=2"], "no table"),
        (["--requests", "0"], "num_requests"),
        (["--requests", "9"], "warm_up_s = 30, and the 9 requests arrive within"),
        (["--seed", "-1"], "seed = -1"),
        (["--output", __file__], "which cannot be made: File exists"),
        (["--warm-up", "-5"], "warm_up_s = -5"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_main(monkeypatch, "simulate", "--seed", "0", *args) == 2
    error = capsys.readouterr().err
    assert error.strip().startswith("error: ")
    assert message in error
    assert "Traceback" not in error


def test_a_run_that_refuses_all_at_once_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rows = "2024-01-01 00:00:00,50000,1", "2024-01-01 00:00:01,50000,1"
    (tmp_path / "long.csv").write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    replay = '{ kind = "replay", file = "long.csv" }'
    (tmp_path / "one.toml").write_text(f"[workload]\nnum_requests = 1\narrivals = {replay}\nlengths = {replay}\n")
    assert run_main(monkeypatch, "simulate", str(tmp_path / "one.toml")) == 0
    assert "no full answer, because" in capsys.readouterr().out


def test_tables_leave_out_what_says_nothing(traces: Path, tmp_path: Path):
    scenario = read_scenario(read_table(EXAMPLES / "synthetic.toml"))
    scenario = replace(scenario, workload=replace(scenario.workload, num_requests=20))
    records = simulate(scenario.make_workload(), scenario.make_config()).records
    summary = summarise(records)
    assert "prefix cache" not in figures(summary).markdown()
    assert "refused" not in figures(summary).markdown()
    assert compare({"this": summary, "that": summary}).markdown().count("\n") == 3
    assert latencies(summary).markdown().startswith("| ms | mean |")
    assert [milliseconds(value) for value in (0.0, 0.00123, 0.0999, 12.3456)] == ["0", "1.23", "99.9", "12,346"]


def test_the_speed_of_the_simulator_is_measured_on_a_run_that_ends(traces: Path):
    workload = simulator.trace_workload(traces, rate=5.0)
    speed, events = simulator.timed(workload)
    assert speed["requests"] == events["RequestFinished"] == 60
    assert speed["answer_tokens"] == sum(request.num_output_tokens for request in workload.requests)
    shares = simulator.profiled(lambda: simulator.timed(simulator.trace_workload(traces, 5.0, 5)))
    assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert {module for module, _ in shares} >= {"core/engine/core.py", "built-in functions"}
    assert "| `core/engine/core.py` |" in simulator.report(speed, shares, "python ...")


def test_routers_are_compared_on_one_workload():
    experiment = read_experiment("manylora/figure-20")
    workload = merge(experiment.workload, {"num_requests": 60})
    setups = {name: merge(experiment.setups[name], {"num_replicas": 2}) for name in ("affinity", "random")}
    experiment = replace(experiment, workload=workload, setups=setups, warm_up_s=0.0)
    cases = cases_of(experiment, seeds=1, traces=None)
    results = Runner(None).run(cases.values())
    figures = {
        setup: results[case.key].figures for (setup, point, _), case in cases.items() if point == "padded, 14 req/s"
    }
    assert all(one["tpot_p50"] <= one["tpot_p99"] for one in figures.values())
    assert figures["affinity"]["loads"] <= figures["random"]["loads"]
    assert all(1.0 <= one["busiest_over_mean"] <= 2.0 for one in figures.values())
