"""`manylora plan`: from options and files to tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import app
from typer.testing import CliRunner

from manylora.core.errors import AdapterError, ConfigError
from manylora.lab.planning.settings import Axis, adapters_in, read_axis, read_plan_settings, variants

SCENARIO = """
[workload]
[workload.arrivals]
kind = "poisson"
rate = 1.0
[workload.lengths]
kind = "parametric"
prompt = { kind = "exponential", mean = 200 }
output = { kind = "exponential", mean = 8 }
[workload.adapters]
count = 6
[setup]
model = "llama-3-8b"
[slo]
ttft_s = 0.5
"""

QUICK = ["--requests", "60", "--seeds", "1", "--tolerance", "0.3"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.toml"
    path.write_text(SCENARIO)
    return path


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words, *QUICK], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_plan_says_capacity_memory_cost_and_what_binds(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    text = run(str(file), "--price", "1.5", "--json", str(written))
    for words in (
        "P99 TTFT <= 0.5 s",
        "capacity of a replica",
        "bottleneck",
        "cost per hour",
        "weights",
        "share of time",
    ):
        assert words in text
    (one,) = json.loads(written.read_text())
    assert one["settings"] == {} and one["scenario"]["workload"]["adapters"]["count"] == 6
    plan = one["plan"]
    assert plan["capacity_requests_per_s"] > 1 and plan["cost"]["per_hour"] == 1.5
    assert plan["load_tests"][0]["measured_s"].keys() == {"ttft"}
    assert plan["usage"]["memory"]["over_time"].keys() == {"seconds", "kv", "prefixes", "adapters", "free"}


@pytest.mark.slow
def test_variants_are_planned_side_by_side(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    text = run(str(file), "--compare", "gpu=a40,h100", "--price", "a40=1", "--rate", "8", "--json", str(written))
    assert "a40" in text and "h100" in text and "replicas" in text
    a40, h100 = json.loads(written.read_text())
    assert a40["settings"] == {"gpu": "a40"} and h100["scenario"]["setup"]["hardware"] == "h100"
    assert h100["plan"]["capacity_requests_per_s"] > 2 * a40["plan"]["capacity_requests_per_s"]
    assert a40["plan"]["cost"] is not None and h100["plan"]["cost"] is None


@pytest.mark.slow
def test_devices_that_a_model_does_not_fit_are_left_out(file: Path) -> None:
    text = run(str(file), "--compare", "tp=1,2", "--model", "llama-2-70b", "--gpu", "a100-80", "--price", "2")
    assert "left out tp 1: llama-2-70b on 1 x a100-80 needs" in " ".join(text.split())
    assert "least cost: tp 2" in text
    with pytest.raises(ConfigError, match="on 2 x a40 needs"):
        run(str(file), "--compare", "tp=1,2", "--model", "llama-2-70b", "--gpu", "a40")


def test_a_model_that_fits_no_device_is_told_once(file: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(file), *QUICK, "--model", "llama-2-70b"])
    assert isinstance(result.exception, ConfigError) and "on 1 x a40 needs" in str(result.exception)
    assert not result.output


def test_a_trace_brings_times_lengths_and_its_rate(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:{second:02d}.0000000,{100 + second},5\n" for second in range(40))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    written = tmp_path / "plan.json"
    run(str(file), "--trace", str(trace), "--json", str(written))
    (one,) = json.loads(written.read_text())
    assert one["plan"]["demand"]["rate"] == pytest.approx(1.0)
    assert one["plan"]["num_replicas"] == 1


def test_a_file_can_say_how_to_plan(file: Path, tmp_path: Path) -> None:
    how = '[plan]\nrate = 3\npercentile = 90\nprices = { h100 = 2.5 }\n[plan.compare]\ngpu = ["h100"]\n'
    file.write_text(SCENARIO + how)
    written = tmp_path / "plan.json"
    run(str(file), "--rate", "2", "--json", str(written))
    (one,) = json.loads(written.read_text())
    assert one["settings"] == {"gpu": "h100"} and "plan" not in one["scenario"]
    assert one["plan"]["demand"]["rate"] == 2.0 and one["plan"]["demand"]["price_per_hour"] == 2.5
    assert one["plan"]["objective"]["percentile"] == 90


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (5, "plan = 5, expected a table"),
        ({"rat": 1}, r"plan\.rat, which nothing reads: did you mean 'rate'"),
        ({"rate": "x"}, r"plan\.rate = 'x', expected a number"),
        ({"prices": 1}, r"plan\.prices = 1, expected a table"),
        ({"prices": {"a40": "cheap"}}, r"plan\.prices\.a40 = 'cheap', expected a number"),
        ({"compare": {"gpu": "a40"}}, "gpu = 'a40' to compare"),
    ],
)
def test_a_wrong_plan_table_is_named(table: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan_settings(table)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "gpu"], "Got --compare 'gpu'"),
        (["--compare", "policy=fifo,lifo"], "Got policy = 'lifo', expected one of"),
        (["--compare", "color=red"], "Got 'color' to compare, expected one of adapters, eviction"),
        (["--price", "cheap"], "Got --price 'cheap'"),
        (["--price", "1", "--price", "2"], "Got --price '2' beside another price"),
        (["--price", "a40=1", "--price", "a40=2"], "Got --price 'a40=2' beside another price"),
        (["--price", "inf"], "price_per_hour = inf, expected above 0, and finite"),
        (["--rate", "inf"], "Got rate = inf, expected above 0, and finite"),
        (["--adapters", "nowhere"], "Got --adapters 'nowhere'"),
        (["--adapters", "\u00b2"], "Got --adapters '\u00b2'"),
        (["--gpu", "abacus"], "Got hardware = 'abacus'"),
        (["--percentile", "100"], "percentile = 100"),
        (["--tolerance", "0"], r"tolerance = 0\.0, expected a share"),
        (["--tolerance", "-2"], r"tolerance = -2\.0, expected a share"),
        (["--set", "place.x=1"], "Got scenario.place, which nothing reads"),
        (["--compare", "gpu=a40,"], "at least one value"),
        (["--compare", "gpu=a40", "--compare", "hardware=h100"], "Got gpu to compare twice"),
        (["--compare", "gpu=a40,h100", "--profile", "cpu.json"], "Got gpu to compare beside a profile"),
        (
            ["--compare", "model=llama-7b", "--compare", "setup.profile=cpu.json"],
            "Got model to compare beside a profile",
        ),
        (["--price", "abacus=1"], "Got a price for 'abacus'"),
        (["--json", "nowhere/plan.json"], "there is no folder nowhere"),
        (["--json", "."], "--json '.', which is a folder"),
    ],
)
def test_what_is_wrong_is_named(file: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["plan", str(file), *QUICK, *words], catch_exceptions=False)


def test_every_variant_is_looked_at_before_the_first_is_simulated(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []
    monkeypatch.setattr("manylora.cli.commands.plan.make_plan", lambda *args, **kwargs: planned.append(args))
    with pytest.raises(ConfigError, match="Got hardware = 'abacus'"):
        CliRunner().invoke(app, ["plan", str(file), "--compare", "gpu=a40,abacus", *QUICK], catch_exceptions=False)
    assert not planned


# -- variants ----------------------------------------------------------------------------------------------------------


def test_axes_make_every_combination() -> None:
    axes = [read_axis("gpu=a40,l40s"), read_axis("setup.scheduler.max_num_seqs=8,16")]
    assert axes[0] == Axis("gpu", "setup.hardware", ("a40", "l40s"))
    table = {"setup": {"model": "llama-3-8b"}}
    made = variants(table, axes)
    assert [list(one.settings.values()) for one in made] == [["a40", "8"], ["a40", "16"], ["l40s", "8"], ["l40s", "16"]]
    assert made[3].table == {"setup": {"model": "llama-3-8b", "hardware": "l40s", "scheduler": {"max_num_seqs": 16}}}
    assert table == {"setup": {"model": "llama-3-8b"}}
    assert [one.settings for one in variants(table, [])] == [{}]


def test_a_folder_of_adapters_is_counted(tmp_path: Path) -> None:
    for name, fields in {
        "a": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
        "b": {"r": 16, "target_modules": "all-linear", "rank_pattern": {"q_proj": 64}},
    }.items():
        (tmp_path / name).mkdir()
        content = {"peft_type": "LORA", "lora_alpha": 16, **fields}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(content))
    found = adapters_in(tmp_path)
    assert found["count"] == 2 and found["ranks"] == [8, 64]
    assert found["targets"] == ["q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError):
        adapters_in(tmp_path)
    with pytest.raises(ConfigError, match="No adapter in"):
        adapters_in(tmp_path / "a")
